from __future__ import annotations

from typing import Any

import pytest
import torch

from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch
from shards.exec.fake import FakeNetwork
from shards.exec.fake_device import FakeDevice
from shards.model import Model
from shards.warmup import BrokenModel, warm_up


class NumbNetwork(FakeNetwork):
    """Answers nothing but NaN."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return torch.full_like(super().forward(batch), float("nan"))


def an_engine(network: FakeNetwork) -> Engine:
    return Engine(Model("some", network), EngineOptions(kv_blocks=16))


def test_a_warm_engine_has_measured_prefill_and_caches_nothing() -> None:
    engine = an_engine(FakeNetwork())
    warm_up(engine)
    load = engine.step().load
    assert load.prefill_s_per_token > 0
    assert load.blocks_free == load.blocks_total
    assert not engine.snapshot()
    engine.check()


def test_a_model_that_cannot_answer_is_found_before_any_client_does() -> None:
    with pytest.raises(BrokenModel, match="some cannot answer"):
        warm_up(an_engine(NumbNetwork()))


class PreparedDevice(FakeDevice):
    prepared: tuple[int, int] | None = None
    most_rows = 1024

    def prepare(self, rows: int, drawn: int = 0) -> None:
        self.prepared = rows, drawn


@pytest.mark.parametrize(
    ("more", "prepared"),
    [({}, (5, 128)), ({"speculate": "off"}, (5, 5)), ({"deterministic": True}, None)],
    ids=str,
)
def test_a_device_compiles_for_every_batch_size_beforehand_that_drafts_can_make_unless_batches_have_one(
    more: dict[str, Any], prepared: tuple[int, int] | None
) -> None:
    network = PreparedDevice()
    options = EngineOptions(kv_blocks=16, max_running=5, **more)
    engine = Engine(Model("some", network), options)
    warm_up(engine)
    assert network.prepared == prepared
    assert not engine.has_work
    engine.check()

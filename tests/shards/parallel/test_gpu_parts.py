"""The GPU's decoder in parts, on interpreted kernels: two processes of gloo give what one gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from shards.exec.drawing import Drawing
from shards.network.config_file import read_config
from shards.network.group import ALONE, Group
from shards.network.loading import load_weights
from shards.parallel.cut import PartBuilder
from shards.parallel.part import Part
from tests.shards.parallel.processes import in_processes
from tests.shards.quantised_checkpoints import save_quantised
from tests.shards.tiny_checkpoints import a_batch, save_checkpoint, some_tokens

if TYPE_CHECKING:
    from shards.gpu.network import GpuNetwork

pytest.importorskip("triton", reason="triton is not installed")


class Case(NamedTuple):
    """A checkpoint of this kind, in a published form or in floating point, with whole or divided experts."""

    kind: str
    scheme: str | None = None
    whole_experts: bool = True

    def save(self, folder: Path) -> Path:
        """Write it; returns its own folder."""
        if self.scheme is None:
            save_checkpoint(folder, self.kind)
            return folder
        save_quantised(folder, self.kind, self.scheme)
        return folder / "quantised"


CASES = [
    Case("olmo2"),
    Case("gpt-oss"),
    Case("gpt-oss", whole_experts=False),
    Case("qwen3 moe", "compressed-tensors, int8 W8A16"),
    Case("mixtral", "awq", whole_experts=False),
]
"""Between them: norms over all heads, biases, sinks, windows, and experts in both forms that stay in their bits."""


def network(folder: Path, case: Case, group: Group) -> GpuNetwork:
    from shards.gpu.decoder import GpuDecoder
    from shards.gpu.network import GpuNetwork
    from shards.gpu.step import StepOptions
    from shards.gpu.weights import moved

    config = read_config(folder)
    share = Part(group.rank, group.size, case.whole_experts)
    part = config if group.size == 1 else share.config(config)
    build = (lambda builder: builder) if group.size == 1 else partial(PartBuilder.of, group=group, part=share)
    read = load_weights(folder, config, dtype="float32", is_for_gpu=True, builder_of=build)
    weights = moved(read, part, device=torch.device("cpu"), dtype=torch.float32)
    made = GpuNetwork(GpuDecoder(part, weights, group=group), options=StepOptions(rows=4))
    made.allocate(8)
    return made


def run(group: Group, folders: dict[Case, Path]) -> dict[Case, tuple[Any, list[int | None]]]:
    """For each checkpoint: logits of a chunk, and tokens of two steps, the second submitted at once."""
    found = {}
    for case, folder in folders.items():
        made, prompt = network(folder, case, group), some_tokens(5)
        logits = made.forward(a_batch((prompt[:3], 0, (3,)))).numpy()
        batch = a_batch((prompt[3:4], 3, (3,)), (prompt[:2], 0, (5,)), wanted=[0, 2])
        warm = [Drawing(temperature=1.5, seed=5, position=4), Drawing()]
        first = made.submit(batch, warm)
        following = a_batch(([0], 4, (3,)), ([0], 2, (5,)))
        ahead = type(following)(
            following.token_ids,
            following.positions,
            following.slots,
            following.rows,
            following.logit_rows,
            ahead=((0, 0), (1, 1)),
        )
        second = made.submit(ahead, warm)
        found[case] = (logits, made.collect(first) + made.collect(second))
    return found


@pytest.mark.slow("three processes with an interpreter of kernels: 45 s of CPU")
@pytest.mark.timeout(300)
def test_two_parts_give_the_logits_and_tokens_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = {case: case.save(tmp_path / str(number)) for number, case in enumerate(CASES)}
    (alone,) = in_processes(1, _run_alone, folders)
    first, second = in_processes(2, run, folders)
    for case in CASES:
        expected, tokens = alone[case]
        assert expected.std() > 0.5
        for part in (first, second):
            torch.testing.assert_close(torch.from_numpy(part[case][0]), torch.from_numpy(expected), atol=1e-3, rtol=0)
            assert part[case][1] == tokens
        # equal bits: what a process draws must be what the others draw
        assert (first[case][0] == second[case][0]).all()


def _run_alone(_: Group, folders: dict[Case, Path]) -> Any:
    return run(ALONE, folders)

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shards.exec.runner import Flight, Runner
from shards.exec.sampling import Sampler
from shards.model import Model
from shards.nouns import SamplingParams
from tests.shards.tiny_checkpoints import VOCABULARY, save_checkpoint


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder, "qwen3")
    return Runner(Model.load(folder).network)


def greedy(count: int) -> tuple[Sampler, ...]:
    params = SamplingParams(temperature=0.0)
    return tuple(Sampler(params, seed=0, stop_token_ids=frozenset(), vocabulary=VOCABULARY) for _ in range(count))


def test_a_token_is_drawn_for_each_row_of_logits(runner: Runner) -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[0, 5] = logits[1, 7] = 1.0
    samples = runner.collect(Flight((), greedy(2), logits=logits))
    assert [sample.token_id for sample in samples if sample] == [5, 7]


@pytest.mark.parametrize(
    ("logits", "given"),
    [
        (None, "None"),
        (torch.zeros(1, VOCABULARY), f"(1, {VOCABULARY})"),
        (torch.zeros(3, VOCABULARY), f"(3, {VOCABULARY})"),
        (torch.zeros(2, VOCABULARY + 1), f"(2, {VOCABULARY + 1})"),
    ],
    ids=str,
)
def test_logits_of_another_shape_than_the_plan_are_an_error(
    runner: Runner, logits: torch.Tensor | None, given: str
) -> None:
    with pytest.raises(ValueError, match="logits of shape") as refused:
        runner.collect(Flight((), greedy(2), logits=logits))
    assert str(refused.value) == f"the network gave logits of shape {given} for 2 rows"

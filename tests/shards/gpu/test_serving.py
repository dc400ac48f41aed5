"""The engine on a GPU's network: running ahead, drawing there, and equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shards.draft_model import DraftModel
from shards.exec.batch import Batch
from shards.exec.drawing import Drawing, Sample
from shards.gpu.decoder import GpuDecoder
from shards.gpu.network import GpuNetwork
from shards.gpu.step import StepOptions
from shards.gpu.transfers import Ticket
from shards.gpu.weights import moved
from shards.model import Model
from shards.network.config import NetworkConfig, Rope
from shards.network.loading import random_weights
from tests.shards.driver import Clock, Driver, a_tokenizer
from tests.shards.gpu.conftest import INTERPRETED
from tests.shards.tiny_checkpoints import a_batch, some_tokens

WARM = {"temperature": 1.5, "top_p": 0.95, "seed": 3}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"new": 3},
    "warm": {"new": 4, **WARM},
    "changed": {
        "new": 4,
        "top_logprobs": 2,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 2.0},
        **WARM,
    },
}


class CountingNetwork(GpuNetwork):
    """Notes how many batches were submitted and not collected."""

    due = most_due = 0

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> Ticket:
        self.due += 1
        self.most_due = max(self.most_due, self.due)
        return super().submit(batch, drawings)

    def collect(self, ticket: object) -> list[Sample | None]:
        self.due -= 1
        return super().collect(ticket)


CONFIG = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 2, 1, 16, 512, 1e-6, Rope(), (None,))
"""One layer, two heads: the interpreter takes its time for each."""


# the interpreter multiplies the bits of bf16
TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=TYPES, ids=str)
def a_network(device: torch.device, request: pytest.FixtureRequest) -> Callable[[], CountingNetwork]:
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=device, dtype=request.param)
    return lambda: CountingNetwork(GpuDecoder(CONFIG, weights), options=StepOptions(rows=4))


def prompt_of(key: str) -> list[int]:
    return some_tokens(3 + list(ASKED).index(key), seed=len(key))


def answers(network: CountingNetwork, keys: Sequence[str], **options: object) -> dict[tuple[object, int], list[int]]:
    driver = Driver(network, kv_blocks=8, max_running=4, **options)
    for key in keys:
        driver.ask(key, prompt_of(key), **ASKED[key])
    driver.run()
    network.steps.check()
    return dict(driver.drawn)


def test_running_ahead_changes_no_answer_in_any_batch(a_network: Callable[[], CountingNetwork]) -> None:
    network = a_network()
    together = answers(network, list(ASKED))
    assert {key: len(tokens) for (key, _), tokens in together.items()} == {"greedy": 3, "warm": 4, "changed": 4}
    assert network.most_due == 2
    waiting = a_network()
    assert answers(waiting, ["warm"], run_ahead="off")["warm", 0] == together["warm", 0]
    assert waiting.most_due == 1
    assert answers(a_network(), ["changed"])["changed", 0] == together["changed", 0]


def test_an_exact_batch_is_computed_without_graphs_and_padding(a_network: Callable[[], CountingNetwork]) -> None:
    network = a_network()
    network.allocate(8)
    taken: list[int] = []
    run = network.steps._decoding.run
    network.steps._decoding.run = lambda bucket: (taken.append(bucket), run(bucket))[1]  # type: ignore[method-assign]
    network.forward(a_batch((prompt_of("warm"), 0, (5,)), wanted=[]))
    batch = a_batch(([7], 4, (5,)))
    padded = network.forward(batch).clone()
    exact = [
        network.forward(
            Batch(batch.token_ids, batch.positions, batch.slots, batch.rows, batch.logit_rows, is_exact=True)
        )
    ]
    assert taken == [1]
    tolerance = 1e-4 if network.decoder.weights.embedding.dtype == torch.float32 else 2e-2
    assert torch.allclose(padded, exact[0], atol=tolerance)


def test_a_deterministic_engine_draws_the_same_alone_and_beside_others(
    a_network: Callable[[], CountingNetwork],
) -> None:
    keys = ["warm", "changed"]
    together, apart = (a_network() for _ in range(2))
    both = answers(together, keys, deterministic=True)
    assert together.most_due == 0
    for key in keys:
        assert answers(apart, [key], deterministic=True)[key, 0] == both[key, 0]


def test_more_sequences_than_a_step_may_draw_are_refused_when_the_engine_is_made(
    a_network: Callable[[], CountingNetwork],
) -> None:
    with pytest.raises(ValueError, match="max_running is 5; this network draws at most 4 tokens a step"):
        Driver(a_network(), max_running=5)
    network = a_network()
    network.allocate(8)
    with pytest.raises(ValueError, match="a step draws 5 tokens, and there is room for 4"):
        network.submit(a_batch(*(([1], 0, (row,)) for row in range(5))), [Drawing()] * 5)


class Drafting(CountingNetwork):
    """Notes how many rows beside the first the steps of its one sequence have."""

    drafted: int = 0

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> Ticket:
        self.drafted += len(batch.rows) - 1
        return super().submit(batch, drawings)


@pytest.mark.parametrize("warm", [{}, {"temperature": 0.1, "seed": 3}], ids=["greedy", "warm"])
def test_drafts_change_no_answer(device: torch.device, warm: dict[str, Any]) -> None:
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=device, dtype=torch.float32)
    found = []
    for speculate in ("auto", "off"):
        network = Drafting(GpuDecoder(CONFIG, weights), options=StepOptions(rows=40))
        driver = Driver(network, kv_blocks=8, max_running=4, speculate=speculate)
        # what three tokens of the prompt are followed by depends on the answer, which soon repeats itself
        driver.ask("repeats", some_tokens(2) * 4, new=20, **warm)
        driver.run()
        network.steps.check()
        found.append((driver.drawn["repeats", 0], network.drafted, driver.load))
    (fast, drafted, load), (slow, none, _) = found
    assert fast == slow
    assert drafted > 0
    assert none == 0
    assert load is not None
    assert load.drafted_tokens == drafted


class Timed(Drafting):
    """Each step takes time of a clock."""

    clock: Clock
    step_s: float

    def collect(self, ticket: object) -> list[Sample | None]:
        self.clock.now_s += self.step_s
        return super().collect(ticket)


# two networks are captured and measured before they serve, which takes the stand-in a minute, and minutes if it is busy
@pytest.mark.timeout(600)
def test_a_draft_model_on_the_same_device_changes_no_answer(device: torch.device) -> None:
    weights = moved(random_weights(CONFIG, seed=1), CONFIG, device=device, dtype=torch.float32)

    def a_timed(step_s: float) -> Timed:
        network = Timed(GpuDecoder(CONFIG, weights), options=StepOptions(rows=2, graph_tokens=0))
        network.clock, network.step_s = clock, step_s
        return network

    clock = Clock()
    network, small, alone = a_timed(0.02), a_timed(0.001), a_timed(0.02)
    draft_model = DraftModel(Model("small", small, a_tokenizer()), 8 * small.block_bytes, clock=clock)
    draft_model.prepare(1)
    fast = Driver(network, clock=clock, draft_model=draft_model, kv_blocks=8, max_running=1)
    network.prepare(1, fast.engine.options.drawn_rows(network.most_rows))
    captured = [each.steps._decoding.captured for each in (network, small)]
    slow = Driver(alone, clock=clock, kv_blocks=8, max_running=1)
    for driver in (fast, slow):
        driver.ask("warm", prompt_of("warm"), new=9, **WARM)
        driver.run()
        driver.network.steps.check()
    assert fast.drawn == slow.drawn
    # steps with drafts have more rows than sequences run, and none is captured while they wait
    assert captured == [each.steps._decoding.captured for each in (network, small)]
    assert network.drafted > 0
    assert fast.load is not None
    # the same weights agree, with the same random numbers
    assert fast.load.model_drafted_tokens == fast.load.model_accepted_tokens > 2

"""Logits with penalties, bias, stops and masks, against what the host's sampler computes with torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from shards.exec.drawing import Drawing
from shards.exec.sampling import Sampler, _adjust, sample
from shards.gpu.draws import Draws
from shards.gpu.fill import fill_drawings
from shards.gpu.layout import Layout, drawing_fields
from shards.gpu.transfers import samples_of
from shards.kernels.adjust import MOST_BIASES, Adjustments, adjust_reference
from shards.kernels.draw import Draw
from shards.kernels.logprobs import MOST_TOP
from shards.kernels.sampling import DrawnRows, sample_reference
from shards.nouns import SamplingParams
from shards.sched import limits

VOCABULARY = 200
PROMPT = np.array([5, 9, 9, 70, 199], dtype=np.uint32)


class SomeTokens:
    """A guide that allows what it was given."""

    eos_token_ids = frozenset({3})

    def __init__(self, allowed: list[int]) -> None:
        self._allowed = np.isin(np.arange(VOCABULARY), allowed)

    def allowed(self) -> Any:
        return self._allowed

    def note(self, token_id: int) -> None: ...


def a_sampler(rng: random.Random, *, is_greedy: bool) -> Sampler:
    """A sampler with any combination of what changes logits."""
    changes: dict[str, Any] = {
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.8]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.7, -0.4]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.3, -0.2]),
        "logit_bias": {token: rng.uniform(-8, 8) for token in rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 40]))},
        "min_new_tokens": rng.choice([0, 0, 3]),
        "top_logprobs": rng.choice([None, None, 0, 2, 20]),
    }
    if not is_greedy:
        changes |= {
            "temperature": rng.choice([0.6, 1.7]),
            "top_k": rng.choice([0, 30]),
            "top_p": rng.choice([1.0, 0.9]),
        }
    stops = frozenset(rng.sample(range(VOCABULARY), 60))
    sampler = Sampler(SamplingParams(**changes), seed=rng.getrandbits(64), stop_token_ids=stops, vocabulary=VOCABULARY)
    if rng.random() < 0.3:
        sampler.guide = SomeTokens(rng.sample(range(VOCABULARY), 40))  # type: ignore[assignment]
    return sampler


@dataclass
class Side:
    """The device's side: slots of rows, the fields of a step, and what it draws."""

    draws: Draws
    pool: torch.Tensor

    @classmethod
    def of(cls, device: torch.device, rows: int) -> Side:
        pool = torch.zeros(rows, dtype=torch.int32, device=device)
        draws = Draws(pool, VOCABULARY)
        draws.reserve(rows)
        return cls(draws, pool)

    def drawings(self, samplers: list[Sampler], *, begins: bool, known: list[list[int]]) -> list[Drawing]:
        drawings = []
        for slot, (sampler, tokens) in enumerate(zip(samplers, known, strict=True)):
            beginning = sampler.beginning(np.array([*PROMPT, *tokens], dtype=np.uint32)) if begins else None
            kept = sampler.adjustment(slot, 0, beginning) if sampler.keeps_state else None
            drawings.append(sampler.drawing(0, kept))
        return drawings

    def fields(self, samplers: list[Sampler], drawings: list[Drawing]) -> dict[str, torch.Tensor]:
        self.draws.begin(drawings)
        layout = Layout.of(drawing_fields(len(drawings)))
        host = torch.zeros(layout.words, dtype=torch.int32)
        fill_drawings(layout.arrays(host.numpy()), drawings, range(len(drawings)))
        self.draws.send_masks([sampler.mask() for sampler in samplers if sampler.guide is not None])
        return layout.tensors(host.to(self.pool.device))

    def adjustments(self, fields: dict[str, torch.Tensor]) -> Adjustments:
        draws = self.draws
        return Adjustments(fields["adjusted"], fields["penalties"], draws._entries, draws._biases, draws._masks)


@pytest.mark.parametrize("seed", range(8))
def test_greedy_rows_draw_the_tokens_and_logprobs_of_the_host_step_after_step(device: torch.device, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    samplers = [a_sampler(rng, is_greedy=True) for _ in range(5)]
    for sampler in samplers:
        sampler.begin(PROMPT)
    side, drawn = Side.of(device, len(samplers)), [list[int]() for _ in samplers]
    for step in range(6):
        logits = torch.randn(len(samplers), VOCABULARY, generator=generator) * 3
        expected = sample(logits.clone(), samplers)
        # the slots are begun anew once in between, as those of a sequence that had to give way to others
        drawings = side.drawings(samplers, begins=step in (0, 4), known=drawn)
        fields = side.fields(samplers, drawings)
        found = side.draws.run(logits.to(device), fields, truncated=True)
        samples = samples_of(DrawnRows(found.tokens.cpu(), found.logprobs.cpu()), drawings)
        for row, (ours, theirs) in enumerate(zip(samples, expected, strict=True)):
            assert ours is not None
            assert theirs is not None
            assert ours.token_id == theirs.token_id, (step, row)
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-5)
                assert [token for token, _ in ours.logprobs.top] == [token for token, _ in theirs.logprobs.top]
                assert [value for _, value in ours.logprobs.top] == pytest.approx(
                    [value for _, value in theirs.logprobs.top], abs=1e-5
                )
            samplers[row].note(ours.token_id)
            drawn[row].append(ours.token_id)
        assert side.pool.tolist() == [tokens[-1] for tokens in drawn]


@pytest.mark.parametrize("seed", range(4))
def test_any_combination_draws_what_the_reference_draws_and_changes_logits_as_the_host_does(
    device: torch.device, dtype: torch.dtype, seed: int
) -> None:
    rng = random.Random(seed)
    samplers = [a_sampler(rng, is_greedy=rng.random() < 0.3) for _ in range(6)]
    tokens = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 3]))] for _ in samplers]
    for sampler, known in zip(samplers, tokens, strict=True):
        sampler.drawn = len(known)
        sampler.begin(np.array([*PROMPT, *known], dtype=np.uint32))
    logits = (torch.randn(len(samplers), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    side = Side.of(device, len(samplers))
    fields = side.fields(samplers, side.drawings(samplers, begins=True, known=tokens))
    adjustments = side.adjustments(fields)
    changed = adjust_reference(logits.to(device), adjustments)
    torch.testing.assert_close(changed.cpu(), _adjust(logits.float().clone(), samplers), atol=1e-5, rtol=1e-5)
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    draw = Draw(
        **{name: fields[name] for name in names},
        position=fields["drawn_at"],
        top_logprobs=fields["top_logprobs"],
        adjustments=adjustments,
    )
    expected = sample_reference(logits.to(device), draw)
    found = side.draws.run(logits.to(device), fields, truncated=True)
    assert found.tokens[1].all()
    assert torch.equal(found.tokens[0].long(), expected)


# a penalty so small that it divides beyond the largest number
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_rows_without_a_token_to_draw_are_not_sound_and_their_neighbours_are(device: torch.device) -> None:
    params = [SamplingParams(), SamplingParams(presence_penalty=1.0), SamplingParams(repetition_penalty=1e-38)]
    samplers = [Sampler(each, seed=0, stop_token_ids=frozenset(), vocabulary=VOCABULARY) for each in params]
    samplers[0].guide = SomeTokens([])  # type: ignore[assignment]
    side = Side.of(device, 3)
    fields = side.fields(samplers, side.drawings(samplers, begins=True, known=[[]] * 3))
    logits = torch.full((3, VOCABULARY), 4.0, device=device)
    assert side.draws.run(logits, fields, truncated=True).tokens[1].tolist() == [0, 1, 0]
    logits[1, 150] = -torch.inf
    assert side.draws.run(logits, fields, truncated=True).tokens[1].tolist() == [0, 0, 0]


def test_a_step_with_more_than_was_reserved_is_refused(device: torch.device) -> None:
    side = Side.of(device, 1)
    samplers = [
        Sampler(SamplingParams(logit_bias={1: 1.0}), seed=0, stop_token_ids=frozenset(), vocabulary=VOCABULARY)
    ] * 2
    with pytest.raises(ValueError, match="needs slot 1 and 0 masks; 1 of each are reserved"):
        side.fields(samplers, side.drawings(samplers, begins=True, known=[[], []]))
    many = {token: float(token) for token in range(VOCABULARY)}
    draws = Draws(side.pool, 2000)
    sampler = Sampler(
        SamplingParams(logit_bias=many | {token: float(token) for token in range(1100)}),
        seed=0,
        stop_token_ids=frozenset(),
        vocabulary=2000,
    )
    drawing = sampler.drawing(0, sampler.adjustment(0, 0, sampler.beginning(PROMPT)))
    with pytest.raises(ValueError, match="a bias has 1100 different values, and there is room for 1023"):
        draws.begin([drawing])


def test_requests_may_ask_for_as_much_as_kernels_take() -> None:
    assert (limits.MOST_BIASES, limits.MOST_TOP_LOGPROBS) == (MOST_BIASES, MOST_TOP)

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shards.exec import sampling
from shards.exec.drawing import Drawing
from shards.exec.sampling import Sampler, sample
from shards.nouns import DIALS, SamplingParams

VOCABULARY = 50


def a_sampler(
    *, seed: int = 0, prompt: tuple[int, ...] = (), stops: frozenset[int] = frozenset(), **params: object
) -> Sampler:
    sampler = Sampler(SamplingParams(**params), seed=seed, stop_token_ids=stops, vocabulary=VOCABULARY)  # type: ignore[arg-type]
    sampler.begin(np.array(prompt, dtype=np.uint32))
    return sampler


def some_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 3


def drawn_by(logits: torch.Tensor, draws: int = 4000, *, candidates: int = 128, **params: object) -> torch.Tensor:
    """The share of each token in draws from one row of logits."""
    samplers = [a_sampler(seed=seed, **params) for seed in range(draws)]
    tokens = [draw.token_id for draw in sample(logits.expand(draws, -1), samplers, candidates=candidates)]
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[1]) / draws


def test_temperature_zero_takes_the_likeliest():
    logits = some_logits(3)
    assert [draw.token_id for draw in sample(logits, [a_sampler()] * 3)] == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion(temperature):
    logits = some_logits()
    expected = (logits[0] / temperature).softmax(0)
    assert (drawn_by(logits, temperature=temperature) - expected).abs().max() < 0.03


def test_a_temperature_near_zero_is_greedy_and_a_huge_one_is_flat():
    logits = some_logits()
    assert drawn_by(logits, 20, temperature=1e-30)[logits.argmax()] == 1
    assert drawn_by(logits, temperature=1e30).max() < 0.04


@pytest.mark.parametrize("candidates", [4, 128])
@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_k": 5}, {"top_k": 1000}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 5, "top_p": 0.6}],
    ids=str,
)
def test_top_k_and_top_p_keep_what_they_should(params, candidates):
    logits = some_logits()
    probabilities, order = logits[0].softmax(0).sort(descending=True)
    keep = torch.arange(VOCABULARY) < params.get("top_k", VOCABULARY)
    probabilities = torch.where(keep, probabilities, 0)
    probabilities /= probabilities.sum()
    keep &= probabilities.cumsum(0) - probabilities < params.get("top_p", 1.0)
    expected = torch.zeros(VOCABULARY).index_put((order,), torch.where(keep, probabilities, 0))
    shares = drawn_by(logits, candidates=candidates, temperature=1.0, **params)
    assert (shares[expected == 0] == 0).all()
    assert (shares - expected / expected.sum()).abs().max() < 0.03


def test_the_number_of_candidates_changes_no_draw():
    logits = some_logits()
    few, many = (drawn_by(logits, 500, candidates=count, temperature=1.0, top_p=0.97) for count in (3, 128))
    assert torch.equal(few, many)


@pytest.mark.parametrize("more", [{}, {"top_k": 40}])
def test_min_p_drops_what_is_unlikely_against_the_likeliest(more):
    logits = some_logits()
    probabilities = logits[0].softmax(0)
    shares = drawn_by(logits, temperature=1.0, min_p=0.2, **more)
    assert (shares[probabilities < 0.2 * probabilities.max()] == 0).all()
    assert (shares[probabilities > 0.3 * probabilities.max()] > 0).all()


def test_the_repetition_penalty_covers_prompt_and_output_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    logits, sampler = some_logits(), a_sampler(repetition_penalty=1.7, prompt=(3, 9))
    sampler.note(20)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([[3, 9, 20]]), logits.clone())
    assert torch.allclose(sampling._adjust(logits.clone(), [sampler]), expected)


def test_presence_and_frequency_count_the_output_only():
    logits, sampler = some_logits(), a_sampler(presence_penalty=0.5, frequency_penalty=0.25, prompt=(3,))
    for token in (20, 20, 7):
        sampler.note(token)
    change = sampling._adjust(logits.clone(), [sampler]) - logits
    assert change[0, 20].item() == pytest.approx(-1.0, abs=1e-6)
    assert change[0, 7].item() == pytest.approx(-0.75, abs=1e-6)
    assert change.count_nonzero() == 2


def test_logit_bias_forces_and_forbids():
    logits = some_logits()
    assert sample(logits, [a_sampler(logit_bias={7: 100.0})])[0].token_id == 7
    best = int(logits.argmax())
    assert sample(logits, [a_sampler(logit_bias={best: -100.0})])[0].token_id != best


def test_an_answer_does_not_end_before_min_new_tokens():
    logits = some_logits()
    best = int(logits.argmax())
    sampler = a_sampler(min_new_tokens=1, stops=frozenset({best}))
    assert sample(logits, [sampler])[0].token_id != best
    sampler.note(0)
    assert sample(logits, [sampler])[0].token_id == best


def test_a_seed_decides_and_neighbours_do_not():
    logits = some_logits(40, seed=3)
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {},
        {"temperature": 1.2, "top_k": 9, "min_p": 0.1},
    ]
    samplers = [a_sampler(seed=row, **kinds[row % 4]) for row in range(40)]
    together = sample(logits, samplers)
    for row in range(40):
        assert sample(logits[row : row + 1], [samplers[row]])[0].token_id == together[row].token_id


def test_the_same_seed_draws_anew_at_each_position():
    logits, sampler = torch.zeros((1, VOCABULARY)), a_sampler(seed=5, temperature=1.0)
    tokens = []
    for _ in range(30):
        tokens.append(sample(logits, [sampler])[0].token_id)
        sampler.note(tokens[-1])
    assert len(set(tokens)) > 15


def test_logprobs_are_of_the_raw_logits():
    logits = some_logits(2)
    samplers = [a_sampler(top_logprobs=3, logit_bias={7: 100.0}, temperature=0.3), a_sampler(top_logprobs=0)]
    forced, plain = sample(logits, samplers)
    expected = logits.log_softmax(1)
    assert forced.token_id == 7
    assert forced.logprobs.logprob == pytest.approx(expected[0, 7].item())
    assert [token for token, _ in forced.logprobs.top] == expected[0].topk(3).indices.tolist()
    assert plain.logprobs.top == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_nan_or_infinity_is_named_and_the_others_go_on(value):
    logits = some_logits(3)
    logits[1, 4] = value
    samplers = [a_sampler(temperature=1.0, top_logprobs=1) for _ in range(3)]
    first, broken, last = sample(logits, samplers)
    assert broken is None
    assert first is not None
    assert last is not None


class UnluckySampler(Sampler):
    def uniform(self) -> float:
        return 1 - 2**-24


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_random_number_next_to_one_still_lands_on_a_likely_token(top_k):
    logits = torch.full((1, VOCABULARY), -200.0)
    logits[0, :3] = torch.tensor([5.0, 4.0, 5.0])
    params = SamplingParams(temperature=1.0, top_k=top_k)
    sampler = UnluckySampler(params, seed=0, stop_token_ids=frozenset(), vocabulary=VOCABULARY)
    assert sample(logits, [sampler])[0].token_id in (0, 1, 2)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 1.0}},
        {"min_new_tokens": 1},
    ],
    ids=str,
)
def test_what_needs_a_table_over_the_vocabulary_keeps_state_on_a_device(params):
    sampler = Sampler(SamplingParams(**params), seed=1, stop_token_ids=frozenset({3}), vocabulary=VOCABULARY)
    assert sampler.keeps_state
    for _ in range(3):
        sampler.note(1)
    assert sampler.keeps_state
    assert not a_sampler(top_logprobs=0, min_p=0.5).keeps_state


def test_a_device_begins_with_what_penalties_count_and_with_nothing_else():
    known = np.array([5, 6, 5, 7], dtype=np.uint32)
    packed = [known[:2].tobytes(), known[2:].tobytes()]
    for params, prompt, answer in (
        ({"repetition_penalty": 1.1}, *packed),
        ({"presence_penalty": 1.0}, b"", packed[1]),
        ({"logit_bias": {3: 1.0}}, b"", b""),
    ):
        sampler = a_sampler(**params)
        sampler.note(5)
        sampler.note(7)
        begins = sampler.beginning(known)
        assert (begins.prompt, begins.answer) == (prompt, answer)
        assert begins.bias == tuple(sampler.params.logit_bias.items())


def test_a_device_may_end_an_answer_once_it_is_long_enough_counting_tokens_on_the_way():
    sampler = Sampler(SamplingParams(min_new_tokens=2), seed=1, stop_token_ids=frozenset({3}), vocabulary=VOCABULARY)
    assert [sampler.adjustment(0, unseen, None).may_end for unseen in range(3)] == [False, False, True]
    assert sampler.beginning(np.array([5], dtype=np.uint32)).stops == (3,)


def test_a_device_draws_by_the_same_parameters_at_the_place_of_the_token():
    sampler = a_sampler(seed=2**64 - 1, temperature=0.7, top_k=VOCABULARY + 5, top_p=0.9, min_p=0.1)
    sampler.note(4)
    # a top-k of the whole vocabulary is none
    expected = Drawing(temperature=0.7, top_k=0, top_p=0.9, min_p=0.1, seed=2**64 - 1, position=3)
    assert sampler.drawing(unseen=2) == expected
    assert a_sampler(top_k=7, temperature=1e-6).drawing(unseen=0) == Drawing()


@pytest.mark.parametrize("dial", DIALS, ids=lambda dial: dial.name)
def test_every_number_of_a_draw_reaches_a_device(dial):
    """A parameter that only the host applies would have no effect on a GPU, and no error either."""

    def told(params: SamplingParams) -> object:
        sampler = Sampler(params, seed=1, stop_token_ids=frozenset(), vocabulary=VOCABULARY)
        return sampler.drawing(0, sampler.adjustment(0, 0, sampler.beginning(np.array([5], dtype=np.uint32))))

    # greedy draws have no other parameters
    usual = {"temperature": 0.8}
    changed = next(value for value in (0.5, 2) if value != dial.default and dial.metadata["holds"](value))
    assert told(SamplingParams(**usual | {dial.name: changed})) != told(SamplingParams(**usual)), dial.name

"""Draws tokens from logits: one pass over all rows of a step, each with its own parameters and randomness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from shards.exec.drawing import GREEDY, Adjustment, Drawing, Sample, SlotState
from shards.grammar.guide import Guide
from shards.nouns import SamplingParams, TokenLogprobs

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the softmax of logits divided by less is one-hot in float32."""

CANDIDATES = 128
"""Top-k and top-p first examine this many of the likeliest tokens: sorting whole vocabularies would be slow."""

_MORE_CANDIDATES = 16
"""Factor on the candidates for rows with a top-p or top-k that reaches further."""

_UNIFORM_STEP = 2.0**-24
"""Resolution of the random number: the finest that float32 has over all of [0, 1)."""


class Sampler:
    """How one sequence draws: its parameters, its seed, and the tokens that it has seen and drawn so far.

    The n-th token depends only on (seed, n) and the row's own logits. A `guide`, set before the first draw, limits the
    tokens that may be drawn. The first `drawn` tokens of the answer were drawn elsewhere. If it `keeps_state`, a device
    that draws for it has a slot for it.
    """

    def __init__(
        self, params: SamplingParams, *, seed: int, stop_token_ids: frozenset[int], vocabulary: int, drawn: int = 0
    ) -> None:
        self.params = params
        self.drawn = drawn
        self.is_greedy = params.temperature < _GREEDY_BELOW
        self.is_filtered = params.top_k > 0 or params.top_p < 1
        self.repeats = params.repetition_penalty != 1
        self.counts_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.guide: Guide | None = None
        self.seen: Tensor | None = None
        self.counts: Tensor | None = None
        self.bias = tuple(params.logit_bias.items())
        self.seed = seed
        self._seed_bytes = seed.to_bytes(8, "little")
        self.stop_token_ids = stop_token_ids
        self._vocabulary = vocabulary
        top_k = params.top_k if params.top_k < vocabulary else 0
        self._how = GREEDY[:4] if self.is_greedy else (params.temperature, top_k, params.top_p, params.min_p)
        # a grammar already excludes tokens that end an answer too early
        self._waits = bool(params.min_new_tokens and stop_token_ids and params.grammar is None)
        self.keeps_state = self.repeats or self.counts_output or bool(self.bias) or self._waits

    def __repr__(self) -> str:
        return f"Sampler({self.drawn} drawn, temperature {self.params.temperature})"

    @property
    def forbidden(self) -> frozenset[int]:
        """Tokens that may not be drawn now: those that would end the answer before `min_new_tokens`."""
        return self.stop_token_ids if self.drawn < self.params.min_new_tokens else frozenset()

    @property
    def adjusts(self) -> bool:
        """Whether the raw logits are changed before a token is drawn."""
        return self.repeats or self.counts_output or bool(self.bias) or self.guide is not None or bool(self.forbidden)

    def allowed(self, guide: Guide) -> npt.NDArray[np.bool_]:
        """The tokens that may be drawn now under `guide` [vocabulary].

        Tokens that end the answer too early are excluded, unless no other token is left.
        """
        allowed = guide.allowed()
        ends = self.forbidden | (guide.eos_token_ids if self.params.ignore_eos else frozenset())
        if not ends:
            return allowed
        going_on = allowed.copy()
        going_on[list(ends)] = False
        return going_on if going_on.any() else allowed

    @property
    def remembers(self) -> bool:
        """Whether its next draw depends on its earlier tokens by more than the logits."""
        return self.repeats or self.counts_output or self.params.grammar is not None

    def ahead(self, tokens: int) -> Sampler:
        """The sampler after `tokens` more draws, whatever is drawn. Not for one that `remembers`."""
        later = copy(self)
        later.drawn += tokens
        return later

    def drawing(self, unseen: int, adjustment: Adjustment | None = None) -> Drawing:
        """The parameters with which a device draws the token behind `unseen` ones, which are not recorded yet."""
        position = self.drawn + unseen
        return Drawing(*self._how, self.seed, position, self.params.top_logprobs, self.guide is not None, adjustment)

    def adjustment(self, slot: int, unseen: int, begins: SlotState | None) -> Adjustment:
        """The change of the logits of the token behind `unseen` ones; its state is in `slot`."""
        params = self.params
        may_end = not self._waits or self.drawn + unseen >= params.min_new_tokens
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return Adjustment(slot, *penalties, may_end, begins)

    def beginning(self, known: npt.NDArray[np.uint32]) -> SlotState:
        """The state behind `known`, the prompt and all recorded tokens."""
        prompt, answer = known[: len(known) - self.drawn], known[len(known) - self.drawn :]
        remembered = answer if self.repeats or self.counts_output else answer[:0]
        return SlotState(
            prompt.astype("<u4").tobytes() if self.repeats else b"",
            remembered.astype("<u4").tobytes(),
            self.bias,
            tuple(self.stop_token_ids) if self._waits else (),
        )

    def mask(self) -> bytes:
        """The tokens that its guide allows now: bit t % 8 of byte t // 8 is 1 if token t may be drawn."""
        assert self.guide is not None, "only an answer with a grammar has a mask"
        return np.packbits(self.allowed(self.guide), bitorder="little").tobytes()

    def uniform(self) -> float:
        """The random number in [0, 1) for the next token."""
        bits = xxh3_64_intdigest(self._seed_bytes + self.drawn.to_bytes(8, "little"))
        return (bits >> 40) * _UNIFORM_STEP

    def begin(self, prompt: npt.NDArray[np.uint32]) -> None:
        """Record the prompt, once before the first draw here: the repetition penalty covers it.

        Its last `drawn` tokens belong to the answer.
        """
        answered = prompt[len(prompt) - self.drawn :].astype(np.int64)
        # not earlier, since a table over the vocabulary for each waiting request would take much memory
        if self.repeats:
            self.seen = torch.zeros(self._vocabulary, dtype=torch.bool)
            self.seen[torch.from_numpy(prompt.astype(np.int64))] = True
        if self.counts_output:
            self.counts = torch.from_numpy(np.bincount(answered, minlength=self._vocabulary)).float()
        self.resume(prompt)

    def resume(self, prompt: npt.NDArray[np.uint32]) -> None:
        """Let the guide go on behind the last `drawn` tokens of the prompt; all that is needed where a device draws."""
        if self.guide is not None:
            for token_id in prompt[len(prompt) - self.drawn :].tolist():
                self.guide.note(token_id)

    def note(self, token_id: int) -> None:
        """Record a drawn token."""
        self.drawn += 1
        if self.guide is not None:
            self.guide.note(token_id)
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None:
            self.counts[token_id] += 1


def sample(logits: Tensor, samplers: Sequence[Sampler], *, candidates: int = CANDIDATES) -> list[Sample | None]:
    """One token per row of `logits` [rows, vocab] float32; None where a row holds NaN or infinity.

    That includes rows where penalties, bias or grammar cause it, or leave no token that may be drawn.

    In order: repetition penalty (over prompt and output, as in transformers), presence and frequency penalty (over the
    output, as in OpenAI's API), logit bias, tokens forbidden by min_new_tokens or by a grammar, temperature, top-k,
    top-p, min-p.

    Logprobs are the log-softmax of the raw logits, before all of these. `candidates` changes the time, not the tokens;
    `samplers` do not change. Logits may be on any device.
    """
    if logits.is_cpu:
        return _sample(logits, samplers, candidates)
    # tensors made below are made on the device of the logits; on the CPU entering this costs more than some draws
    with logits.device:
        return _sample(logits, samplers, candidates)


def _sample(logits: Tensor, samplers: Sequence[Sampler], candidates: int) -> list[Sample | None]:
    # a sum is not finite if any term is not, and it needs no tensor of the size of the logits
    is_sound: list[bool] = torch.isfinite(logits.sum(1)).tolist()
    plain: list[int] = []
    adjusting: list[int] = []
    for row, sampler in enumerate(samplers):
        (adjusting if sampler.adjusts else plain).append(row)
    tokens: list[int] = logits.argmax(1).tolist() if plain else [0] * len(samplers)
    _draw_into(tokens, logits, {row: row for row in plain if is_sound[row]}, samplers, candidates)
    if adjusting:
        # only rows with adjustments are copied
        adjusted = _adjust(logits[adjusting], [samplers[row] for row in adjusting])
        # NaN or infinity in a row shows in its maximum
        for row, sound in zip(adjusting, adjusted.amax(1).isfinite().tolist(), strict=True):
            is_sound[row] &= sound
        for row, token in zip(adjusting, adjusted.argmax(1).tolist(), strict=True):
            tokens[row] = token
        places = {row: place for place, row in enumerate(adjusting) if is_sound[row]}
        _draw_into(tokens, adjusted, places, samplers, candidates)
    wanting = [row for row, sampler in enumerate(samplers) if is_sound[row] and sampler.params.top_logprobs is not None]
    logprobs = _logprobs(logits, wanting, tokens, samplers) if wanting else {}
    return [Sample(token, logprobs.get(row)) if is_sound[row] else None for row, token in enumerate(tokens)]


def _draw_into(
    tokens: list[int], logits: Tensor, places: Mapping[int, int], samplers: Sequence[Sampler], candidates: int
) -> None:
    """Draw for the rows of `places` that are not greedy, and put the tokens into `tokens`. Row r is at `places[r]`."""
    drawing = [row for row in places if not samplers[row].is_greedy]
    if drawing:
        chosen = [samplers[row] for row in drawing]
        drawn = _draw(logits, [places[row] for row in drawing], chosen, candidates=candidates)
        for row, token in zip(drawing, drawn, strict=True):
            tokens[row] = token


def _adjust(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """`logits`, changed in place by penalties, bias, forbidden tokens and grammars."""
    _penalize_repetition(logits, samplers)
    _penalize_output(logits, samplers)
    bias = [(row, token, value) for row, sampler in enumerate(samplers) for token, value in sampler.bias]
    if bias:
        rows, tokens, values = (list(column) for column in zip(*bias, strict=True))
        logits[rows, tokens] += torch.tensor(values)
    # with a guide, `allowed` already covers the tokens that end an answer
    forbidden = [
        (row, token) for row, sampler in enumerate(samplers) if sampler.guide is None for token in sampler.forbidden
    ]
    if forbidden:
        logits[[row for row, _ in forbidden], [token for _, token in forbidden]] = -torch.inf
    if any(sampler.guide is not None for sampler in samplers):
        disallowed = np.zeros(logits.shape, dtype=np.bool_)
        for row, sampler in enumerate(samplers):
            if sampler.guide is not None:
                np.logical_not(sampler.allowed(sampler.guide), out=disallowed[row])
        logits.masked_fill_(torch.from_numpy(disallowed).to(logits.device), -torch.inf)
    return logits


def _penalize_repetition(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    asking = [(row, sampler.seen, sampler.params) for row, sampler in enumerate(samplers) if sampler.seen is not None]
    if asking:
        rows, seen = [row for row, _, _ in asking], torch.stack([seen for _, seen, _ in asking]).to(logits.device)
        penalty = torch.tensor([[params.repetition_penalty] for _, _, params in asking])
        values = logits[rows]
        logits[rows] = torch.where(seen, torch.where(values < 0, values * penalty, values / penalty), values)


def _penalize_output(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    asking = [
        (row, sampler.counts, sampler.params) for row, sampler in enumerate(samplers) if sampler.counts is not None
    ]
    if asking:
        rows, counts = [row for row, _, _ in asking], torch.stack([counts for _, counts, _ in asking]).to(logits.device)
        frequency = torch.tensor([[params.frequency_penalty] for _, _, params in asking])
        presence = torch.tensor([[params.presence_penalty] for _, _, params in asking])
        logits[rows] -= frequency * counts + presence * (counts > 0)


def _draw(logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler], *, candidates: int) -> list[int]:
    """Draw a token from each of `rows` with its sampler."""
    drawn: dict[int, int] = {}
    by_row = dict(zip(rows, samplers, strict=True))
    for is_filtered in (False, True):
        group = [row for row in rows if by_row[row].is_filtered is is_filtered]
        if group:
            chosen = [by_row[row] for row in group]
            temperatures = torch.tensor([[sampler.params.temperature] for sampler in chosen])
            wanted = logits[group]
            # the largest value is 0, so no temperature makes it infinite
            scaled = (wanted - wanted.amax(1, keepdim=True)) / temperatures
            tokens = _draw_filtered(scaled, chosen, candidates) if is_filtered else _draw_plain(scaled, chosen)
            drawn.update(zip(group, tokens, strict=True))
    return [drawn[row] for row in rows]


def _draw_plain(scaled: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    weights = scaled.softmax(1)
    return _invert(_above_min_p(weights, samplers), samplers)


def _draw_filtered(scaled: Tensor, samplers: Sequence[Sampler], candidates: int) -> list[int]:
    """Top-k, then top-p, then min-p, among the `candidates` likeliest tokens; rows that need more get more."""
    vocabulary = scaled.shape[1]
    candidates = min(candidates, vocabulary)
    total = scaled.logsumexp(1, keepdim=True)
    values, tokens = scaled.topk(candidates, dim=1)
    weights = (values - total).exp()
    mass = weights.cumsum(1)
    top_k = torch.tensor([[min(sampler.params.top_k or vocabulary, vocabulary)] for sampler in samplers])
    top_p = torch.tensor([[sampler.params.top_p] for sampler in samplers])
    # top-p is a share of the mass that top-k leaves: 1, all of it, if top-k leaves more than the candidates
    kept_mass = torch.where(top_k > candidates, 1.0, mass.gather(1, top_k.clamp(max=candidates) - 1))
    is_short = (top_k > candidates) & ((top_k < vocabulary) | (mass[:, -1:] < top_p))
    if candidates < vocabulary and is_short.any():
        return _draw_with_more(scaled, samplers, candidates, is_short[:, 0].tolist())
    within_k = torch.arange(candidates) < top_k
    within_p = (mass - weights < top_p * kept_mass) | (top_p >= 1)
    within_p[:, 0] = True
    weights = _above_min_p(torch.where(within_k & within_p, weights, 0.0), samplers)
    places = torch.tensor(_invert(weights, samplers))
    drawn: list[int] = tokens.gather(1, places[:, None])[:, 0].tolist()
    return drawn


def _draw_with_more(scaled: Tensor, samplers: Sequence[Sampler], candidates: int, is_short: list[bool]) -> list[int]:
    drawn: dict[int, int] = {}
    for wants_more, count in ((False, candidates), (True, candidates * _MORE_CANDIDATES)):
        group = [row for row, short in enumerate(is_short) if short is wants_more]
        if group:
            tokens = _draw_filtered(scaled[group], [samplers[row] for row in group], count)
            drawn.update(zip(group, tokens, strict=True))
    return [drawn[row] for row in range(len(samplers))]


def _above_min_p(weights: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    if not any(sampler.params.min_p for sampler in samplers):
        return weights
    least = torch.tensor([[sampler.params.min_p] for sampler in samplers])
    return torch.where(weights >= least * weights.amax(1, keepdim=True), weights, 0.0)


def _invert(weights: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """For each row the index at which the running sum of `weights` passes the row's random share of the total."""
    mass = weights.cumsum(1)
    total = mass[:, -1:]
    share = torch.tensor([[sampler.uniform()] for sampler in samplers]) * total
    # rounding could raise the share to the total, and the index past the end
    share = torch.minimum(share, torch.nextafter(total, torch.zeros_like(total)))
    drawn: list[int] = torch.searchsorted(mass, share, right=True)[:, 0].tolist()
    return drawn


def _logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], samplers: Sequence[Sampler]
) -> dict[int, TokenLogprobs]:
    logprobs = logits[list(rows)].log_softmax(1)
    most = max(samplers[row].params.top_logprobs or 0 for row in rows)
    values, ids = logprobs.topk(min(most, logits.shape[1]), dim=1)
    tops: list[list[tuple[int, float]]] = [
        list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    own = logprobs.gather(1, torch.tensor([[tokens[row]] for row in rows]))[:, 0].tolist()
    return {
        row: TokenLogprobs(logprob, tuple(top[: samplers[row].params.top_logprobs]))
        for row, logprob, top in zip(rows, own, tops, strict=True)
    }

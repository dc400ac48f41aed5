"""What transformers computes with the same weights, and what it says about an answer that an engine drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shards.nouns import Finished, FinishReason, SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5


class Truth:
    """A model of transformers, and the `rounding` by which logits of another program may differ from its own.

    An answer is judged token by token behind the tokens that were drawn before it, in one pass: after a tie that
    rounding decided otherwise, the rest of the answer is judged as well. `largest` is the largest distance seen of a
    log-probability, and `ties` counts the tokens that were not the likeliest one by a margin within rounding.
    """

    def __init__(
        self, model: Any, *, rounding: float, tokenizer: Any = None, eos: frozenset[int] = frozenset()
    ) -> None:
        self.model, self.rounding, self.tokenizer, self.eos = model, rounding, tokenizer, eos
        self.largest, self.ties, self.judged = 0.0, 0, 0
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Sequence[int], last: int) -> Tensor:
        """The logits behind each of the `last` tokens of `tokens`, float32 [last, vocabulary]."""
        key = (last, *tokens)
        if key not in self._known:
            if len(self._known) > 64:
                self._known.pop(next(iter(self._known)))
            with torch.inference_mode():
                output = self.model(torch.tensor([list(tokens)]), logits_to_keep=last, use_cache=False)
            self._known[key] = output.logits[0].float()
        return self._known[key]

    def objections(
        self,
        prompt: Sequence[int],
        drawn: Sequence[int],
        sampling: SamplingParams,
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        answered: int = 0,
    ) -> list[str]:
        """What is wrong with the tokens `drawn` behind `prompt`, whose last `answered` tokens began the answer."""
        if not drawn:
            return []
        raw = self.logits([*prompt, *drawn[:-1]], len(drawn))
        found: list[str] = []
        begun = list(prompt[len(prompt) - answered :]) if answered else []
        for place, token in enumerate(drawn):
            self.judged += 1
            answer = [*begun, *drawn[:place]]
            scores = self._adjusted(raw[place], [*prompt, *drawn[:place]], answer, sampling)
            slack = self.rounding * max(1.0, sampling.repetition_penalty, 1 / sampling.repetition_penalty)
            if (lacking := _lacking(scores, token, sampling)) > 0:
                self.ties += 1
            if lacking > slack / max(sampling.temperature, GREEDY_BELOW if sampling.temperature else 1.0):
                found.append(f"token {place} is {token}, which lacks {lacking:.4f} to what may be drawn")
        if sampling.top_logprobs is not None:
            found += self._objections_to_logprobs(raw.log_softmax(1), drawn, logprobs, sampling.top_logprobs)
        return found

    def objections_to_end(
        self, drawn: Sequence[int], end: Finished, sampling: SamplingParams, new: int, *, answered: int = 0
    ) -> list[str]:
        """What is wrong with the place and the reason of an answer's end; `new` tokens were allowed."""
        stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self.eos)
        expected: tuple[Any, ...] = ()
        text = ""
        for place, token in enumerate(drawn):
            before, many = text, place + 1 + answered
            if self.tokenizer is not None and sampling.stop:
                text = self.tokenizer.decode(drawn[: place + 1], skip_special_tokens=True)
            is_stopped = token in stops or any(text.count(stop) > before.count(stop) for stop in sampling.stop)
            if is_stopped and many > sampling.min_new_tokens:
                expected = (place + 1, FinishReason.STOP)
            elif place + 1 == new:
                expected = (new, FinishReason.LENGTH)
            if expected:
                break
        got = (len(drawn), end.reason)
        found = [] if got == expected else [f"it ended as {got} ({end.message}), and not as {expected or 'going on'}"]
        return found if end.output_tokens == len(drawn) else [*found, f"{end.output_tokens} tokens are told"]

    def _adjusted(self, raw: Tensor, seen: Sequence[int], answer: Sequence[int], sampling: SamplingParams) -> Tensor:
        from transformers import RepetitionPenaltyLogitsProcessor

        scores = raw.clone()
        if sampling.repetition_penalty != 1:
            penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            scores = penalty(torch.tensor([list(seen)]), scores[None])[0]
        if answer and (sampling.presence_penalty or sampling.frequency_penalty):
            counts = torch.bincount(torch.tensor(list(answer)), minlength=len(scores)).float()
            scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        for token, bias in sampling.logit_bias.items():
            scores[token] += bias
        if len(answer) < sampling.min_new_tokens:
            stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self.eos)
            scores[list(stops)] = -torch.inf
        return scores

    def _objections_to_logprobs(
        self, truth: Tensor, drawn: Sequence[int], told: Sequence[TokenLogprobs], top: int
    ) -> list[str]:
        if len(told) != len(drawn):
            return [f"{len(told)} log-probabilities for {len(drawn)} tokens"]
        found = []
        for place, (row, token, each) in enumerate(zip(truth, drawn, told, strict=True)):
            pairs = [(each.logprob, float(row[token])), *((value, float(row[other])) for other, value in each.top)]
            pairs += zip((value for _, value in each.top), row.topk(len(each.top)).values.tolist(), strict=True)
            largest = max(abs(ours - theirs) for ours, theirs in pairs)
            self.largest = max(self.largest, largest)
            if largest > self.rounding:
                found.append(f"a log-probability at token {place} differs by {largest:.4f}")
            if len(each.top) != min(top, len(row)):
                found.append(f"{len(each.top)} log-probabilities at token {place} where {top} were asked for")
        return found


def _lacking(scores: Tensor, token: int, sampling: SamplingParams) -> float:
    """By how much the token's score lies below the least of those that may be drawn; 0 if it may be drawn."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if sampling.temperature < GREEDY_BELOW:
        return max(0.0, float(scores.max() - scores[token]))
    scores = kept = scores[None] / sampling.temperature
    ids = torch.zeros(1, 1, dtype=torch.long)
    if 0 < sampling.top_k < scores.shape[1]:
        kept = TopKLogitsWarper(sampling.top_k)(ids, kept)
    if sampling.top_p < 1:
        kept = TopPLogitsWarper(sampling.top_p)(ids, kept)
    if sampling.min_p > 0:
        kept = MinPLogitsWarper(sampling.min_p)(ids, kept)
    least = kept[kept > -torch.inf].min()
    return max(0.0, float(least - scores[0, token]))

"""The limits of an engine, and the reasons for its rejections. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shards.kv.adapter_domain import is_adapter_domain
from shards.kv.keys import TOKEN_BYTES, is_chunk_domain
from shards.kv.table import blocks_for
from shards.nouns import DIALS, MOST_CHOICES, Cause, Finished, FinishReason, Grammar, SamplingParams, Submission
from shards.wire.limits import MOST_GRAMMAR_CHARACTERS

MOST_TOP_LOGPROBS = 20
MOST_BIASES = 1023
"""Most different values in one logit_bias; of tokens with equal values there may be any number."""

MOST_DOCUMENTS = 512
MOST_STOP_STRINGS = 64
MOST_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a request is rejected: `message` for people, `cause` for machines."""

    message: str
    cause: Cause = Cause.INVALID

    def ends(self, submission: Submission) -> list[Finished]:
        """The end of every choice of `submission`."""
        reason, tokens = FinishReason.REJECTED, submission.prompt_tokens
        return [
            Finished(submission.key, choice, reason, tokens, 0, 0, message=self.message, cause=self.cause)
            for choice in range(submission.ends)
        ]


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes against which a request is checked.

    `has_tokenizer`: stop strings can be detected. `shapes_answers`: grammars are supported.
    """

    vocabulary: int
    context_tokens: int
    blocks: int
    has_tokenizer: bool
    shapes_answers: bool = False

    def refusal(self, submission: Submission) -> Refusal | None:
        """The reason why `submission` can never be served; None if it can."""
        message = next(self._objections(submission), None)
        if message:
            return Refusal(message)
        message = self._grammar_objection(submission.sampling.grammar)
        if message:
            return Refusal(message, Cause.GRAMMAR)
        message = self._oversize(submission.prompt_tokens, submission.max_new_tokens)
        return Refusal(message, Cause.CONTEXT) if message else None

    def piece_refusal(self, token_ids: bytes, *, missing_tokens: int) -> Refusal | None:
        """The reason why `token_ids` cannot continue a prompt that lacks `missing_tokens`; None if they can."""
        if len(token_ids) % TOKEN_BYTES:
            return Refusal(f"{len(token_ids)} bytes are not a whole number of tokens")
        excess = len(token_ids) // TOKEN_BYTES - missing_tokens
        if excess > 0:
            return Refusal(f"{excess} more tokens than the announced prompt_tokens have arrived")
        largest = int(np.frombuffer(token_ids, dtype="<u4").max(initial=0))
        if largest >= self.vocabulary:
            return Refusal(f"the prompt has token {largest}, and the vocabulary has {self.vocabulary}")
        return None

    def _grammar_objection(self, grammar: Grammar | None) -> str | None:
        if grammar is None:
            return None
        if not self.shapes_answers:
            return "this shard cannot hold an answer to a schema or grammar: it lacks llguidance, or a tokenizer"
        if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
            return f"it has {len(grammar.text)} characters; at most {MOST_GRAMMAR_CHARACTERS} are read"
        return None

    def _oversize(self, prompt: int, new: int) -> str | None:
        if prompt + new > self.context_tokens:
            return (
                f"the prompt's {prompt} tokens and max_new_tokens {new} make {prompt + new}, "
                f"and the model's context is {self.context_tokens} tokens"
            )
        if peak_blocks(prompt, new) > self.blocks:
            return (
                f"prompt and answer of up to {prompt + new} tokens need {peak_blocks(prompt, new)} KV blocks and this "
                f"shard has {self.blocks}: send a shorter prompt, a smaller max_new_tokens, or give the shard memory"
            )
        return None

    def _objections(self, submission: Submission) -> Iterator[str]:
        if submission.prompt_tokens < 1:
            yield f"prompt_tokens is {submission.prompt_tokens}; a prompt has at least one token"
        if submission.max_new_tokens < 1:
            yield f"max_new_tokens is {submission.max_new_tokens}; it must be at least 1"
        if not 1 <= submission.choices <= MOST_CHOICES:
            yield f"choices is {submission.choices}; it must be between 1 and {MOST_CHOICES}"
        if is_chunk_domain(submission.domain):
            yield "the domain is one of chunks, in which no prompt is computed"
        if is_adapter_domain(submission.domain):
            yield "the domain is one of an adapter; name the adapter instead"
        yield from _blend_objections(submission)
        answered = submission.answered_tokens
        if not 0 <= answered < max(1, submission.prompt_tokens):
            yield f"answered_tokens is {answered}; it must be 0 or more, and below prompt_tokens"
        if answered and submission.choices > 1:
            yield f"choices is {submission.choices}; an answer that began elsewhere has one"
        yield from self._sampling_objections(submission.sampling, answered + submission.max_new_tokens)

    def _sampling_objections(self, sampling: SamplingParams, answer_tokens: int) -> Iterator[str]:
        yield from _number_objections(sampling)
        if not 0 <= sampling.min_new_tokens <= answer_tokens:
            yield f"min_new_tokens is {sampling.min_new_tokens}; it must be between 0 and max_new_tokens"
        if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MOST_TOP_LOGPROBS:
            yield f"top_logprobs is {sampling.top_logprobs}; it must be between 0 and {MOST_TOP_LOGPROBS}"
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            unknown = [token for token in ids if not 0 <= token < self.vocabulary]
            if unknown:
                yield f"{name} names token {unknown[0]}, and the vocabulary has {self.vocabulary}"
        if len(biases := set(sampling.logit_bias.values())) > MOST_BIASES:
            yield f"logit_bias has {len(biases)} different values; at most {MOST_BIASES} are supported: round them"
        if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
            yield "a logit_bias is not a finite number"
        if sampling.stop and not self.has_tokenizer:
            yield "this shard has no tokenizer and cannot watch for stop strings; use stop_token_ids"
        if len(sampling.stop) > MOST_STOP_STRINGS:
            yield f"there are {len(sampling.stop)} stop strings; at most {MOST_STOP_STRINGS} are supported"
        if not all(0 < len(stop) <= MOST_STOP_CHARACTERS for stop in sampling.stop):
            yield f"a stop string is empty or longer than {MOST_STOP_CHARACTERS} characters"


def peak_blocks(prompt_tokens: int, max_new_tokens: int) -> int:
    """The most blocks that a sequence can hold. Its last token is drawn, never computed."""
    return blocks_for(prompt_tokens + max_new_tokens - 1)


def _number_objections(sampling: SamplingParams) -> Iterator[str]:
    for dial in DIALS:
        value = getattr(sampling, dial.name)
        if not dial.metadata["holds"](value):
            yield f"{dial.name} is {value}; it {dial.metadata['must']}"


def _blend_objections(submission: Submission) -> Iterator[str]:
    if submission.blend is None:
        return
    if not 0 <= submission.blend.budget <= 1:
        yield f"the budget of reuse is {submission.blend.budget}; it must be between 0 and 1"
    if len(submission.blend.documents) > MOST_DOCUMENTS:
        yield f"it has {len(submission.blend.documents)} documents to reuse; at most {MOST_DOCUMENTS} are"
    before = 0
    for start, stop in submission.blend.documents:
        if not before <= start < stop <= submission.prompt_tokens:
            yield f"a document is at {start} to {stop} behind {before}, of {submission.prompt_tokens} prompt tokens"
        before = stop

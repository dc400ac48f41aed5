"""A request as a shard's Submit, and a shard's refusal as an error of ours. Pure."""

from __future__ import annotations

import math

from xxhash import xxh3_64_intdigest

from policies.errors import (
    BackendFailed,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unreached,
)
from policies.nouns import DIALS, Grammar, Prompt, Request, Reuse, Sampling
from shards.kv.keys import TOKEN_BYTES
from shards.wire.limits import MOST_GRAMMAR_CHARACTERS
from shards.wire.v1 import shard_pb2 as wire

FORMS = {
    "json_schema": wire.Grammar.JSON_SCHEMA,
    "regex": wire.Grammar.REGEX,
    "choice": wire.Grammar.CHOICE,
    "rules": wire.Grammar.RULES,
}


def submit_of(request: Request, prompt: Prompt, *, adapter: str = "") -> wire.Submit:
    """`request` for `adapter`, or for the model itself, as a Submit without a number. `deadline_s` counts from now.

    Raises InvalidRequest if there are no tokens, a number does not fit the wire or no shard can read the grammar,
    DeadlineExceeded if it is too late.
    """
    if not prompt.token_ids or len(prompt.token_ids) % TOKEN_BYTES:
        raise InvalidRequest("the prompt is empty" if not prompt.token_ids else "the token ids are not whole uint32s")
    if request.deadline_s is not None and request.deadline_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request was sent to a shard")
    source = prompt.transfer
    answered_tokens = 0 if prompt.beginning is None else prompt.beginning.tokens
    try:
        return wire.Submit(
            prompt_tokens=len(prompt.token_ids) // TOKEN_BYTES + answered_tokens,
            answered_tokens=answered_tokens,
            max_new_tokens=request.max_new_tokens - answered_tokens,
            domain=request.domain,
            rank=request.rank,
            deadline_ms=math.ceil(request.deadline_s * 1000) if request.deadline_s else 0,
            prefill_slice=request.prefill_slice_tokens or 0,
            choices=request.sampling.choices,
            sampling=sampling_of(request.sampling, request.id),
            trace=prompt.headers.get("traceparent", ""),
            preemptible=request.preemptible,
            source=None if source is None else wire.Source(address=source["address"], tokens=source["tokens"]),
            reuse=None if prompt.reuse is None else reuse_of(prompt.reuse),
            adapter=adapter,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"a number is out of range: {error}") from error


def reuse_of(reuse: Reuse) -> wire.Reuse:
    """`reuse` for the wire."""
    starts, stops = zip(*reuse.spans, strict=True)
    return wire.Reuse(start=starts, stop=stops, budget=reuse.budget)


def sampling_of(sampling: Sampling, request_id: str) -> wire.Sampling:
    """`sampling` for the wire. A seed may be any integer; its lowest 64 bits count.

    Without one the seed is made of `request_id`, so that any shard can continue the answer.
    """
    seed = xxh3_64_intdigest(request_id.encode()) if sampling.seed is None else sampling.seed % 2**64
    return wire.Sampling(
        **{name: getattr(sampling, name) for name in DIALS},
        seed=seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        top_logprobs=sampling.top_logprobs,
        logit_bias=sampling.logit_bias,
        min_new_tokens=sampling.min_new_tokens,
        grammar=None if sampling.grammar is None else grammar_of(sampling.grammar),
    )


def grammar_of(grammar: Grammar) -> wire.Grammar:
    """`grammar` for the wire. Raises InvalidRequest for grammars that shards cannot read."""
    if grammar.form not in FORMS or not grammar.text:
        what = f"as '{grammar.form[:40]}'" if grammar.form not in FORMS else "by a schema that is not there"
        hint = "give it a JSON schema under `json_schema.schema`, or say `structured_outputs`"
        raise InvalidRequest(f"shards cannot shape an answer {what}", hint=hint, param=grammar.field)
    if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
        message = f"`{grammar.field}` has {len(grammar.text)} characters"
        hint = f"shards read at most {MOST_GRAMMAR_CHARACTERS}"
        raise InvalidRequest(message, hint=hint, param=grammar.field)
    return wire.Grammar(form=FORMS[grammar.form], text=grammar.text)


def error_of(end: wire.Finished, backend: str, grammar: Grammar | None = None) -> ExpectedError:
    """The error for a choice that ended without a finish reason; its answer was to be of `grammar`."""
    because = f": {end.message}" if end.message else ""
    if end.reason == wire.Finished.DEADLINE:
        return DeadlineExceeded(f"{backend} could not finish before the deadline{because}")
    if end.reason == wire.Finished.CANCELLED:
        return BackendFailed(f"{backend} gave the request up{because}")
    if end.reason != wire.Finished.REJECTED:
        return BackendFailed(f"{backend} failed{because}")
    if end.cause == wire.Finished.CONTEXT:
        return ContextExceeded(end.message or "prompt and answer do not fit the model's context")
    if end.cause == wire.Finished.OVERLOADED:
        return Overloaded(f"{backend} is full{because}", retry_after_s=1.0)
    if end.cause == wire.Finished.DRAINING:
        return Unreached(f"{backend} is about to stop{because}")
    if end.cause == wire.Finished.GRAMMAR and grammar is not None:
        message = f"`{grammar.field}` cannot be held to{because}"
        hint = "leave out unsupported parts, or simplify it; docs/clients.md lists the supported ones"
        return InvalidRequest(message, hint=hint, param=grammar.field)
    return InvalidRequest(end.message or f"{backend} rejected the request")

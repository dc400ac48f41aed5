"""Translation between the engine's nouns and wire messages. Pure; shard.proto describes the packed columns."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shards.nouns import (
    DIALS,
    AdapterUse,
    Blend,
    CacheChange,
    CacheEvent,
    Cause,
    DiskUse,
    DocumentSpan,
    Drawn,
    Finished,
    FinishReason,
    Grammar,
    GrammarForm,
    KvSource,
    Load,
    Progress,
    Report,
    SamplingParams,
    Submission,
    TokenLogprobs,
)
from shards.wire import limits
from shards.wire.v1 import shard_pb2 as wire


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds until the first token of a request."""

    key: Hashable
    ttft_s: float


_LOAD_BYTES = 192
"""An upper bound of the size of a Load."""

Item = Drawn | Progress | Prediction | Finished | CacheEvent
"""The parts of a StepReport."""


class RequestKey(NamedTuple):
    """A request's name in the engine: the router's stream and the id that the router chose on it."""

    stream: int
    request: int


REASONS = {
    FinishReason.STOP: wire.Finished.STOP,
    FinishReason.LENGTH: wire.Finished.LENGTH,
    FinishReason.CANCELLED: wire.Finished.CANCELLED,
    FinishReason.REJECTED: wire.Finished.REJECTED,
    FinishReason.FAILED: wire.Finished.FAILED,
    FinishReason.DEADLINE: wire.Finished.DEADLINE,
}
CAUSES = {
    Cause.INVALID: wire.Finished.INVALID,
    Cause.CONTEXT: wire.Finished.CONTEXT,
    Cause.OVERLOADED: wire.Finished.OVERLOADED,
    Cause.DRAINING: wire.Finished.DRAINING,
    Cause.GRAMMAR: wire.Finished.GRAMMAR,
}
FORMS = {
    wire.Grammar.JSON_SCHEMA: GrammarForm.JSON_SCHEMA,
    wire.Grammar.REGEX: GrammarForm.REGEX,
    wire.Grammar.CHOICE: GrammarForm.CHOICE,
    wire.Grammar.RULES: GrammarForm.RULES,
}
CHANGES = {
    CacheChange.STORED: wire.CacheEvent.STORED,
    CacheChange.EVICTED: wire.CacheEvent.EVICTED,
    CacheChange.CLEARED: wire.CacheEvent.CLEARED,
}


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """`token_ids` as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The token ids in `packed`, little-endian uint32."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_keys(keys: Sequence[int]) -> bytes:
    """Block `keys` as little-endian uint64."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """The block keys in `packed`, little-endian uint64."""
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def submission(submit: wire.Submit, key: Hashable, *, now_s: float) -> Submission:
    """The engine's request for `submit`, which arrived at `now_s` of the engine's clock."""
    return Submission(
        key=key,
        prompt_tokens=submit.prompt_tokens,
        max_new_tokens=submit.max_new_tokens,
        domain=submit.domain,
        rank=submit.rank,
        deadline_s=now_s + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        prefill_slice=submit.prefill_slice or None,
        choices=submit.choices or 1,
        preemptible=submit.preemptible if submit.HasField("preemptible") else True,
        sampling=sampling_params(submit.sampling),
        answered_tokens=submit.answered_tokens,
        source=KvSource(submit.source.address, submit.source.tokens) if submit.HasField("source") else None,
        blend=_blend(submit.reuse) if submit.HasField("reuse") else None,
        adapter=submit.adapter,
    )


def _blend(given: wire.Reuse) -> Blend:
    """The documents that may be blended. Starts without stops are dropped: what is not named is computed."""
    documents = tuple(map(DocumentSpan, given.start, given.stop))
    return Blend(documents, given.budget)


def sampling_params(sampling: wire.Sampling) -> SamplingParams:
    """The parameters of the draws. A factor that was not set (0 on the wire) is off."""
    dials: dict[str, Any] = {dial.name: getattr(sampling, dial.name) or dial.default for dial in DIALS}
    return SamplingParams(
        **dials,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop=tuple(sampling.stop),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        min_new_tokens=sampling.min_new_tokens,
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        logit_bias=dict(sampling.logit_bias),
        grammar=grammar(sampling.grammar) if sampling.HasField("grammar") else None,
    )


def grammar(given: wire.Grammar) -> Grammar:
    """The grammar of an answer. An unknown form becomes None: it is rejected later, never ignored."""
    return Grammar(FORMS.get(given.form), given.text)


def shares(report: Report) -> dict[int, list[Item]]:
    """The items of a step for each stream's own requests, tokens first. Keys of requests must be RequestKeys."""
    found: dict[int, list[Item]] = {}
    predictions = tuple(Prediction(key, seconds) for key, seconds in report.predictions.items())
    for items in (report.drawn, report.progress, predictions, report.finished):
        for item in items:
            assert isinstance(item.key, RequestKey), "only the server submits"
            found.setdefault(item.key.stream, []).append(item)
    return found


def cache_pieces(events: Iterable[CacheEvent]) -> Iterator[CacheEvent]:
    """The same `events` in the same order, each with at most CACHE_PIECE_KEYS keys."""
    for event in events:
        if len(event.keys) <= limits.CACHE_PIECE_KEYS:
            yield event
            continue
        for start in range(0, len(event.keys), limits.CACHE_PIECE_KEYS):
            yield CacheEvent(event.change, event.keys[start : start + limits.CACHE_PIECE_KEYS], event.tier)


def step_reports(items: Sequence[Item], *, epoch: int, step: int) -> list[wire.StepReport]:
    """`items` of one step in as few messages as MESSAGE_BYTES allow, in their order, each with room for a load."""
    report = _step_report(items, epoch, step)
    if len(items) < 2 or report.ByteSize() <= limits.MESSAGE_BYTES - _LOAD_BYTES:
        return [report]
    half = len(items) // 2
    return [
        *step_reports(items[:half], epoch=epoch, step=step),
        *step_reports(items[half:], epoch=epoch, step=step),
    ]


def _step_report(items: Sequence[Item], epoch: int, step: int) -> wire.StepReport:
    report = wire.StepReport(epoch=epoch, step=step)
    drawn = [item for item in items if isinstance(item, Drawn)]
    if drawn:
        report.tokens.CopyFrom(tokens(drawn))
    for item in items:
        if isinstance(item, Progress):
            report.progress.append(progress(item))
        elif isinstance(item, Prediction):
            report.predictions.append(wire.Prediction(request=_request(item.key), ttft_s=item.ttft_s))
        elif isinstance(item, Finished):
            report.finished.append(finished(item))
        elif isinstance(item, CacheEvent):
            report.cache.append(cache_event(item))
    return report


def tokens(drawn: Sequence[Drawn]) -> wire.Tokens:
    """`drawn` as columns; columns with default values only (all choice 0, all one token) stay empty."""
    columns = wire.Tokens(
        request=[_request(item.key) for item in drawn],
        token_ids=pack_ids([token for item in drawn for token in item.token_ids]),
    )
    if any(item.choice for item in drawn):
        columns.choice.extend(item.choice for item in drawn)
    if any(len(item.token_ids) != 1 for item in drawn):
        columns.count.extend(len(item.token_ids) for item in drawn)
    for entry, item in enumerate(drawn):
        columns.logprobs.extend(_token_logprobs(entry, logprobs) for logprobs in item.logprobs)
    return columns


def drawn_of(columns: wire.Tokens) -> Iterator[tuple[int, Drawn]]:
    """The entries of `columns` as (request id, Drawn)."""
    token_ids = unpack_ids(columns.token_ids)
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for found in columns.logprobs:
        top = tuple(zip(unpack_ids(found.top_token_ids), found.top_logprobs, strict=True))
        logprobs.setdefault(found.entry, []).append(TokenLogprobs(found.logprob, top))
    start = 0
    for entry, request in enumerate(columns.request):
        end = start + (columns.count[entry] if columns.count else 1)
        choice = columns.choice[entry] if columns.choice else 0
        yield request, Drawn(request, choice, token_ids[start:end], tuple(logprobs.get(entry, ())))
        start = end


def progress(item: Progress) -> wire.Progress:
    """`item` for the wire."""
    return wire.Progress(
        request=_request(item.key),
        computed_tokens=item.computed_tokens,
        cached_tokens=item.cached_tokens,
        blended_tokens=item.blended_tokens,
    )


def finished(item: Finished) -> wire.Finished:
    """`item` for the wire; its message is cut to TEXT_CHARACTERS."""
    return wire.Finished(
        request=_request(item.key),
        choice=item.choice,
        reason=REASONS[item.reason],
        stop=item.stop,
        prompt_tokens=item.prompt_tokens,
        cached_tokens=item.cached_tokens,
        output_tokens=item.output_tokens,
        message=item.message[: limits.TEXT_CHARACTERS],
        cause=CAUSES[item.cause] if item.cause else wire.Finished.CAUSE_UNSPECIFIED,
        blended_tokens=item.blended_tokens,
        by_token=item.by_token,
    )


def load(now: Load) -> wire.Load:
    """`now` for the wire."""
    return wire.Load(
        running=now.running,
        waiting=now.waiting,
        waiting_tokens=now.waiting_tokens,
        blocks_total=now.blocks_total,
        blocks_free=now.blocks_free,
        prefill_s_per_token=now.prefill_s_per_token,
        step_s=now.step_s,
        draining=now.draining,
        blocks_pinnable=now.blocks_pinnable,
        drafted_tokens=now.drafted_tokens,
        accepted_tokens=now.accepted_tokens,
        disk=_disk_use(now.disk),
        peers=None if now.peers is None else wire.PeerUse(**now.peers._asdict()),
        uncaptured_steps=now.uncaptured_steps,
        model_drafted_tokens=now.model_drafted_tokens,
        model_accepted_tokens=now.model_accepted_tokens,
    )


def adapters(use: AdapterUse, *, known_before: tuple[str, ...] | None = None) -> wire.Adapters:
    """`use` for the wire; without the known names if the router has them already."""
    known = None if use.known == known_before else wire.Adapters.Names(name=use.known)
    return wire.Adapters(known=known, loaded=use.loaded, active=use.active, slots=use.slots)


def adapters_of(told: wire.Adapters, *, before: AdapterUse | None) -> AdapterUse:
    """The adapters of a shard, from its message and what was known of them `before`."""
    known = tuple(told.known.name) if told.HasField("known") or before is None else before.known
    return AdapterUse(known, tuple(told.loaded), tuple(told.active), told.slots)


def _disk_use(use: DiskUse | None) -> wire.DiskUse | None:
    if use is None:
        return None
    return wire.DiskUse(
        held=use.held,
        written=use.written,
        read=use.read,
        broken=use.broken,
        failed=use.failed,
        skipped=use.skipped,
    )


def cache_event(event: CacheEvent) -> wire.CacheEvent:
    """`event` for the wire."""
    return wire.CacheEvent(kind=CHANGES[event.change], keys=pack_keys(event.keys), tier=event.tier)


def _token_logprobs(entry: int, logprobs: TokenLogprobs) -> wire.TokenLogprobs:
    return wire.TokenLogprobs(
        entry=entry,
        logprob=logprobs.logprob,
        top_token_ids=pack_ids([token for token, _ in logprobs.top]),
        top_logprobs=[value for _, value in logprobs.top],
    )


def _request(key: Hashable) -> int:
    assert isinstance(key, RequestKey), "only the server submits"
    return key.request

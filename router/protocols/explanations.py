"""Renders an explanation: as JSON, as a header, and as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from policies.explain import Candidate, Explanation, Skipped
from policies.objections import in_words, worded
from policies.quantities import written_seconds
from policies.rules import Mismatch

MOST_HEADER_BYTES = 4096
"""Most bytes of the header: servers and proxies reject larger ones. Entries that do not fit are counted only."""

DOCUMENTS_HEADER = "X-Pointsman-Document-Order"
"""The header with the ids of a prompt's documents, in their order there."""

_LISTS = ("candidates", "skipped", "dropped", "equals", "pools", "on_miss", "documents")
_ADAPTER = {
    "ready": "has it ready",
    "known": "has to put it into a slot",
    "no_slot": "has no slot for it now",
    "loads": "has yet to load it",
}
"""The backend's work for an adapter, in words."""

_ESSENTIALS = (
    *("request", "config_version", "rule", "service_class", "policy", "chosen", "awaits", "predicted_ttft_s"),
    "left_out",
)


def as_json(explanation: Explanation) -> bytes:
    """All of `explanation`, as JSON."""
    return msgspec.json.format(msgspec.json.encode(_record(explanation)), indent=2)


def as_header(explanation: Explanation) -> str:
    """`explanation` as one line of compact JSON in printable ASCII, at most `MOST_HEADER_BYTES` long.

    If it would be longer, half of the longest list is dropped, the worst candidates first, until it fits; `left_out`
    counts the dropped entries.
    """
    record, left_out = _rounded(_record(explanation)), 0
    while len(text := _line(record)) > MOST_HEADER_BYTES:
        longest = max(_LISTS, key=lambda name: len(record.get(name) or ()))
        entries = record[longest]
        if not entries:
            return _line({name: record[name] for name in _ESSENTIALS})
        kept = len(entries) // 2
        record[longest] = dict(list(entries.items())[:kept]) if isinstance(entries, dict) else entries[:kept]
        left_out += len(entries) - kept
        record["left_out"] = left_out
    return text


def documents_header(ids: Sequence[str]) -> str:
    """`ids` as a JSON array in printable ASCII, at most `MOST_HEADER_BYTES` long: of many, the first that fit."""
    shown, size = list[str](), len("[]")
    for each in ids:
        text = json.dumps(each, ensure_ascii=True).replace("\x7f", "\\u007f")
        size += len(text) + bool(shown)
        if size > MOST_HEADER_BYTES:
            break
        shown.append(text)
    return f"[{','.join(shown)}]"


def as_text(explanation: Explanation) -> str:
    """`explanation` in aligned lines for a terminal."""
    return "\n".join((*_facts_lines(explanation), *_rule_lines(explanation), "", *_decision_lines(explanation)))


def _record(explanation: Explanation) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(explanation)
    if not record["left_out"]:
        del record["left_out"]
    for name in ("prefill", "fetch"):
        if record[name] is None:
            del record[name]
    if not record["documents"]:
        del record["documents"]
    if explanation.dropped:
        record["objections"] = worded(explanation.dropped.values())
    record["skipped"] = [_skipped_record(skipped) for skipped in explanation.skipped]
    for candidate in record["candidates"]:
        for name in ("adapter", "running", "waiting", "total"):
            if candidate[name] is None:
                del candidate[name]
        for name in ("scores", "cost"):
            if not candidate[name]:
                del candidate[name]
    return record


def _skipped_record(skipped: Skipped) -> dict[str, Any]:
    why = [_reason(mismatch) for mismatch in skipped.mismatches]
    return {"rule": skipped.rule, "service_class": skipped.service_class, "why": [*_forbidden(skipped), *why]}


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    for candidate in record["candidates"]:
        if "total" in candidate:
            candidate["total"] = round(candidate["total"], 4)
        if "scores" in candidate:
            candidate["scores"] = {name: value and round(value, 4) for name, value in candidate["scores"].items()}
        if "cost" in candidate:
            candidate["cost"] = {name: [round(value, 3) for value in part] for name, part in candidate["cost"].items()}
    record["predicted_ttft_s"] = _milliseconds(record["predicted_ttft_s"])
    return record


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _line(record: dict[str, Any]) -> str:
    # json escapes all but DEL, which headers may not have either
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True).replace("\x7f", "\\u007f")


def _reason(mismatch: Mismatch) -> str:
    found = "absent" if mismatch.found is None else _value(mismatch.found)
    wanted = " or ".join(map(_value, mismatch.wanted))
    return f"{mismatch.field} is {found}, not {wanted or 'what it asks for'}"


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _fact(value: str | int | None) -> str:
    return "-" if value is None else _value(value)


def _forbidden(skipped: Skipped) -> list[str]:
    return [f"the tenant may not use class {skipped.service_class}"] if skipped.forbidden else []


def _prompt_size(explanation: Explanation) -> str:
    if explanation.likely_prompt_tokens is None:
        return f"{explanation.prompt_tokens:,} tokens"
    low, high = explanation.likely_prompt_tokens
    return f"about {explanation.prompt_tokens:,} tokens (estimated, {low:,} to {high:,})"


def _facts_lines(explanation: Explanation) -> Iterator[str]:
    sizes = f"{_prompt_size(explanation)}, {explanation.uncached_tokens:,} of them in no cache"
    yield f"request   tenant {explanation.tenant}, model {explanation.model}, priority {explanation.priority or '-'}"
    yield f"          {sizes}, answer of at most {explanation.max_output_tokens:,}"
    if explanation.documents:
        yield f"          documents {', '.join(explanation.documents)}"
    if explanation.facts:
        yield f"          {', '.join(f'{name} {_fact(value)}' for name, value in explanation.facts.items())}"
    yield f"file      version {explanation.config_version}"


def _rule_lines(explanation: Explanation) -> Iterator[str]:
    for at, skipped in enumerate(explanation.skipped):
        reasons = (*_forbidden(skipped), *map(_reason, skipped.mismatches))
        yield f"{'' if at else 'rules':<9} {skipped.rule} no   {'; '.join(reasons)}"
    yield f"{'' if explanation.skipped else 'rules':<9} {explanation.rule} yes"
    lowered = (
        ""
        if explanation.service_class == explanation.ruled_class
        else f", lowered from {explanation.ruled_class} by the priority"
    )
    yield f"class     {explanation.service_class} (rank {explanation.rank}{lowered})"
    if explanation.priority not in (None, explanation.service_class):
        why = "the tenant may not use it, it ranks above, or the rule has the last word"
        yield f"          not {explanation.priority}, as was asked: {why}"
    if explanation.targets:
        targets = (f"{name} {written_seconds(value)}" for name, value in explanation.targets.items())
        yield f"targets   {', '.join(targets)}"
    if explanation.on_miss:
        yield f"on miss   {', then '.join(explanation.on_miss)}"
    shares = ", ".join(f"{pool} {share:.4g}" for pool, share in explanation.shares.items())
    shared = f" (shares: {shares})" if shares else ""
    yield f"pools     {'any' if explanation.pools is None else ', '.join(explanation.pools)}{shared}"
    yield f"policy    {explanation.policy}"


def _decision_lines(explanation: Explanation) -> Iterator[str]:
    if explanation.candidates:
        yield from _table(
            [_heading(explanation), *(_row(explanation, candidate) for candidate in explanation.candidates)]
        )
        if uncounted := [name for name in explanation.weights if name not in explanation.counted]:
            yield f"not counted, since not known of every candidate: {', '.join(uncounted)}"
    for candidate in explanation.candidates:
        if candidate.cost:
            parts = [(name, *part) for name, part in candidate.cost.items() if part[0] > 0]
            total = sum(seconds * weight for _, seconds, weight in parts)
            terms = (f"{name} {seconds:.3f} s x{weight:.3g}" for name, seconds, weight in parts)
            yield f"cost      {candidate.backend} {total:.3f}: {', '.join(terms)}"
    if adapters := [
        f"{candidate.backend} {_ADAPTER[candidate.adapter]}"
        for candidate in explanation.candidates
        if candidate.adapter
    ]:
        yield f"adapter   {explanation.model}: {'; '.join(adapters)}"
    for backend, reason in explanation.dropped.items():
        yield f"dropped   {backend}: {in_words(reason)}"
    if explanation.left_out:
        considered = len(explanation.candidates) + len(explanation.dropped)
        yield f"backends  {considered} of {considered + explanation.left_out:,} were considered"
    if explanation.predicted_ttft_s is not None:
        yield f"expected  first token after {explanation.predicted_ttft_s:.3f} s"
    if explanation.prefill is not None:
        leg = explanation.prefill
        yield f"prefill   at {leg.backend}: saves {leg.saved:.3f} of the cost, transfer included"
    if explanation.fetch is not None:
        fetch = explanation.fetch
        tokens = f"{fetch.tokens:,} of {explanation.prompt_tokens:,} tokens"
        instead = f"instead of computing them in {fetch.computing_s:.3g} s"
        yield f"fetch     {tokens} from {fetch.backend} in {fetch.seconds:.3g} s {instead}"
    others = f" (at random: {', '.join(explanation.equals)} are equally good)" if len(explanation.equals) > 1 else ""
    no_place = (
        f"none: the request waits for {explanation.awaits}" if explanation.awaits else "none: the request is refused"
    )
    yield f"chosen    {explanation.chosen or no_place}{others}"


def _heading(explanation: Explanation) -> list[str]:
    scores = (f"{name} x{weight:g}" for name, weight in explanation.weights.items())
    return ["candidate", "pool", "running", "waiting", "held", *scores, "total"]


def _row(explanation: Explanation, candidate: Candidate) -> list[str]:
    held = "?" if candidate.held_tokens is None else f"{candidate.held_tokens:,}"
    scores = (_score(candidate.scores.get(name)) for name in explanation.weights)
    counts = (_count(candidate.running), _count(candidate.waiting), held)
    return [candidate.backend, candidate.pool, *counts, *scores, _score(candidate.total)]


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        names = (cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
        numbers = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        yield "  ".join((*names, *numbers)).rstrip()

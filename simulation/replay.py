"""A decision log as arrivals: the same requests at the same times, to be decided again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from policies.errors import InvalidRequest
from router.operate.telemetry.decision_reader import records_of
from router.operate.telemetry.decision_record import Record, unpacked_keys
from simulation.arrivals import Arrival
from simulation.client import Call

_USUAL_NEW_TOKENS = 256
"""Length of answers in a log without any answer."""


@dataclass(frozen=True, slots=True)
class Then:
    """The logged decision on one request: its class, and its last backend."""

    service_class: str
    backend: str | None


@dataclass(frozen=True, slots=True)
class Log:
    """The requests of a decision log in order of time, and the decisions on them, by id.

    The answers of `guessed` of them are not in the log.
    """

    arrivals: Sequence[Arrival]
    then: Mapping[str, Then]
    guessed: int = 0


class Agreement(msgspec.Struct, frozen=True):
    """Of `requests` in a log, the number that got the same class, and the same backend, as in the log."""

    requests: int
    same_class: int
    same_backend: int


def read_log(path: Path, *, most: int | None = None) -> Log:
    """The decision log at `path`, or its first `most` lines. Raises InvalidRequest that names the line.

    The log has one key for 512 tokens of a prompt; the rest of a prompt is taken to be unlike any other. A missing
    answer is taken to be as long as the average of its class.
    """
    records = list(islice(records_of(path), most))
    if not records:
        raise InvalidRequest(f"{path} has no decision", hint="see docs/decision-log.md")
    usual = _answers_by_class(records)
    arrivals = [_arrival(record, number, line, usual) for number, (line, record) in enumerate(records)]
    then = {record.request: _then(record) for _, record in records}
    if len(then) != len(records):
        raise InvalidRequest(f"{path} has a request twice", hint="replay the logs of several routers one by one")
    guessed = sum(not record.completion_tokens for _, record in records)
    return Log(sorted(arrivals, key=lambda arrival: arrival.at_s), then, guessed)


def agreement(calls: Iterable[Call], then: Mapping[str, Then]) -> Agreement:
    """How many of `calls`, which replayed a log, agree with `then`."""
    pairs = [(call, then[call.arrival.id]) for call in calls]
    return Agreement(
        requests=len(pairs),
        same_class=sum(call.service_class == was.service_class for call, was in pairs),
        same_backend=sum(call.backend == was.backend for call, was in pairs),
    )


def _arrival(record: Record, number: int, line: int, usual: Mapping[str, float]) -> Arrival:
    answer = (record.completion_tokens or 0) / record.choices or usual.get(record.service_class, _USUAL_NEW_TOKENS)
    try:
        chunks = unpacked_keys(record.keys)
    except ValueError as error:
        raise InvalidRequest(f"line {line}: keys are damaged", hint="see docs/decision-log.md") from error
    return Arrival(
        number,
        record.time,
        max(1, record.prompt_tokens),
        max(1, min(round(answer), record.max_new_tokens)),
        chunks=chunks,
        tenant=record.tenant,
        model=record.model,
        priority=record.priority,
        session=record.session,
        max_new_tokens=record.max_new_tokens,
        deadline_s=record.deadline_s,
        choices=record.choices,
        id=record.request,
        line=line,
    )


def _answers_by_class(records: Iterable[tuple[int, Record]]) -> dict[str, float]:
    answers: dict[str, list[float]] = {}
    for _, record in records:
        if record.completion_tokens:
            answers.setdefault(record.service_class, []).append(record.completion_tokens / record.choices)
    return {name: sum(tokens) / len(tokens) for name, tokens in answers.items()}


def _then(record: Record) -> Then:
    sent = [attempt.backend for attempt in record.tries if attempt.backend is not None]
    return Then(record.service_class, sent[-1] if sent else None)

"""Traces: one JSON object a line for each request, in Mooncake's format with some fields of ours.

Source: kvcache-ai/Mooncake, FAST25-release/traces, and "Mooncake: Trading More Storage for Less Computation" (Qin et
al., FAST 2025): `timestamp` in milliseconds, `input_length` and `output_length` in tokens, `hash_ids` name the first
blocks of 512 tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from policies.errors import InvalidRequest
from simulation.arrivals import CHUNK_TOKENS, Arrival

_MOST_LINES = 5_000_000
_MOST_TOKENS = 100_000_000


class Line(msgspec.Struct, frozen=True):
    """One line of a trace. Without `hash_ids` the prompt is unlike any other."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    tenant: str | None = None
    model: str | None = None
    priority: str | None = None
    session: str | None = None
    max_output_length: int | None = None
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}


def read_trace(path: Path, *, most: int | None = None) -> list[Arrival]:
    """The arrivals in the trace at `path`, in order of time; the first `most` lines of it. Raises InvalidRequest that
    names the line.
    """
    return sorted(_arrivals(path, _MOST_LINES if most is None else most), key=lambda arrival: arrival.at_s)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of `path` that are not empty, with their numbers. Raises InvalidRequest if it cannot be read."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", hint="a trace has one request a line") from error


def _arrivals(path: Path, most: int) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(Line)
    count = 0
    for number, text in lines_of(path):
        if count == most:
            return
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = 'a line is like {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}'
            raise InvalidRequest(f"{path}:{number}: {error}", hint=hint) from error
        if complaint := _complaint(line):
            raise InvalidRequest(f"{path}:{number}: {complaint}", hint="lengths are in tokens, times in milliseconds")
        yield _arrival(line, count, number)
        count += 1
    if not count:
        raise InvalidRequest(f"{path} has no request", hint="a trace has one request a line")


def _complaint(line: Line) -> str | None:
    if line.timestamp < 0:
        return f"timestamp is {line.timestamp:g}; it must be 0 or more"
    if line.input_length < 1 or line.output_length < 1:
        return f"input_length is {line.input_length} and output_length {line.output_length}; both must be 1 or more"
    if line.input_length > _MOST_TOKENS:
        return f"input_length is {line.input_length}; {_MOST_TOKENS:,} at most"
    if line.max_output_length is not None and line.max_output_length < line.output_length:
        return f"max_output_length is {line.max_output_length}, less than the answer's {line.output_length}"
    most = -(-line.input_length // CHUNK_TOKENS)
    if len(line.hash_ids) > most:
        return f"{len(line.hash_ids)} hash_ids name more than a prompt of {line.input_length} tokens; {most} at most"
    if min(line.hash_ids, default=0) < 0:
        return "a hash_id is negative"
    return None


def _arrival(line: Line, number: int, at: int) -> Arrival:
    return Arrival(
        number,
        line.timestamp / 1000,
        line.input_length,
        line.output_length,
        chunks=line.hash_ids,
        tenant=line.tenant,
        model=line.model,
        priority=line.priority,
        session=line.session,
        max_new_tokens=line.max_output_length,
        headers={name.lower(): value for name, value in line.headers.items()},
        metadata=line.metadata,
        line=at,
    )

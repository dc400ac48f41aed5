"""Traces: one JSON object a line for each request, in Mooncake's format with some fields of ours; or CSV
(`simulation/csv_trace.py`).

Source: kvcache-ai/Mooncake, FAST25-release/traces, and "Mooncake: Trading More Storage for Less Computation" (Qin et
al., FAST 2025): `timestamp` in milliseconds, `input_length` and `output_length` in tokens, `hash_ids` name the first
blocks of 512 tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec

from policies.errors import InvalidRequest
from simulation.arrivals import CHUNK_TOKENS, MOST_TOKENS, Arrival
from simulation.csv_trace import FORMATS, CsvRows

_MOST_LINES = 5_000_000
_ONE_A_LINE = "a trace has one request a line"


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
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", hint=_ONE_A_LINE) from error


def _arrivals(path: Path, most: int) -> Iterator[Arrival]:
    lines = lines_of(path)
    first = next(lines, None)
    if first is None:
        raise InvalidRequest(f"{path} has no request", hint=_ONE_A_LINE)
    reader = _reader(path, *first)
    count = 0
    for number, text in chain([first], lines) if isinstance(reader, _JsonLines) else lines:
        if count == most:
            return
        try:
            arrival = reader.arrival(text, count, number)
        except ValueError as error:
            raise InvalidRequest(f"{path}:{number}: {error}", hint=reader.hint) from error
        if arrival is not None:
            yield arrival
            count += 1
    if not count:
        raise InvalidRequest(f"{path} has no request", hint=_ONE_A_LINE)


def _reader(path: Path, number: int, first: bytes) -> _JsonLines | CsvRows:
    """The reader of the lines of a trace with this first line. Raises InvalidRequest if it is of no known format."""
    if first.lstrip().startswith(b"{"):
        return _JsonLines()
    with suppress(ValueError):
        if (rows := CsvRows.under(first)) is not None:
            return rows
    known = " or ".join(", ".join(layout.needed) for layout in FORMATS)
    raise InvalidRequest(
        f"{path}:{number}: the first line is neither a JSON object nor the header of a known trace in CSV",
        hint=f"a header has the columns {known}",
    )


class _JsonLines:
    """Reads JSON objects, one a line."""

    hint = (
        'a line is like {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}: times in '
        "milliseconds, lengths in tokens"
    )

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(Line)

    def arrival(self, text: bytes, number: int, at: int) -> Arrival:
        """The request in `text`. Raises ValueError with the mistake."""
        try:
            line = self._decoder.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        if complaint := _complaint(line):
            raise ValueError(complaint)
        return _arrival(line, number, at)


def _complaint(line: Line) -> str | None:
    if line.timestamp < 0:
        return f"timestamp is {line.timestamp:g}; it must be 0 or more"
    if line.input_length < 1 or line.output_length < 1:
        return f"input_length is {line.input_length} and output_length {line.output_length}; both must be 1 or more"
    if line.input_length > MOST_TOKENS:
        return f"input_length is {line.input_length}; {MOST_TOKENS:,} at most"
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

"""The order in which the lines of a job run: those with the same beginning one after the other.

Lines are sorted by a chain of digests of their prompt's first 256 bytes, 512 bytes, and so on: two prompts that share
their beginning are beside each other. The sort is external: memory for one run, and files for the others.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64

from backends.nesting import decode_json
from router.batches.lines import LinePlace, lines_of, read_line
from router.batches.pace import Pace

RUN_LINES = 65_536
"""Lines that are sorted in memory: 9 MB."""

MOST_MODELS, MOST_NAME = 1000, 512
"""Models of one job that wait for room by their names, and the characters of such a name: a line of any further model
waits for none, and its call says what becomes of it."""

_RUNGS = tuple(256 << rung for rung in range(12))
_KEY_BYTES = 4 + 8 * len(_RUNGS)
_PLACE = Struct("<QQII")
_AT_ONCE = 512
_UNKNOWN, _UNSAID = "?", ""
"""In place of the model of a line that cannot be read, and of one that names none."""


class OrderedLine(NamedTuple):
    """A line in the order, and the number of its model among the order's."""

    line: LinePlace
    model: int


class _Prompt(msgspec.Struct):
    """The members of a body that begin its prompt, in the order in which templates write them."""

    model: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_PROMPTS = msgspec.json.Decoder(_Prompt)


class LineOrder:
    """The places of lines, in a temporary file that is gone when this is closed."""

    def __init__(self, file: BinaryIO, models: tuple[str, ...], count: int) -> None:
        self._file, self.models, self.count = file, models, count

    def __repr__(self) -> str:
        return f"<LineOrder of {self.count} lines>"

    def places(self, at: int, most: int) -> list[OrderedLine]:
        """Up to `most` places from number `at` on; fewer only at the end."""
        self._file.seek(at * _PLACE.size)
        raw = self._file.read(most * _PLACE.size)
        return [
            OrderedLine(LinePlace(number, offset, size), model)
            for number, offset, size, model in _PLACE.iter_unpack(raw)
        ]

    def close(self) -> None:
        self._file.close()


def order_of(
    path: Path,
    scratch: Path,
    pace: Pace,
    *,
    most_bytes: int,
    leave_out: Callable[[int], bool] = lambda _: False,
    is_sorted: bool = True,
) -> LineOrder:
    """The order of the file at `path`, which was checked, without the lines that `leave_out` says by their numbers.

    Not `is_sorted`: that of the file. Works in a thread, at this `pace`. Raises Interrupted.
    """
    models: dict[str, int] = {}
    with ExitStack() as runs:
        files: list[BinaryIO] = []

        def end_run() -> None:
            files.append(runs.enter_context(_run(keys, places, scratch)))

        keys, places = bytearray(), bytearray()
        for line, raw in pace.through(lines_of(path, most_bytes=most_bytes)):
            if leave_out(line.number):
                continue
            model, beginning = _beginning(raw)
            if len(model) > MOST_NAME or (len(models) >= MOST_MODELS and model not in models):
                model = _UNKNOWN
            number = models.setdefault(model, len(models))
            keys += number.to_bytes(4, "big")
            keys += _chain(beginning) if is_sorted else bytes(_KEY_BYTES - 4)
            places += _PLACE.pack(*line, number)
            if len(places) == RUN_LINES * _PLACE.size:
                end_run()
                keys, places = bytearray(), bytearray()
        end_run()
        return _merged(files, scratch, pace, tuple(models))


def _beginning(raw: bytes) -> tuple[str, bytes]:
    """The model of a line, empty if it names none, and the bytes that its prompt is made of."""
    try:
        body = _PROMPTS.decode(read_line(raw).body)
        model = (decode_json(body.model) if body.model else None) or _UNSAID
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # the call will say what is wrong
        return _UNKNOWN, raw
    parts = (body.tools, body.instructions, body.system, body.messages, body.prompt, body.input)
    return model if isinstance(model, str) else _UNKNOWN, b"".join(map(bytes, parts))


def _chain(prompt: bytes) -> bytes:
    """Digests of the first bytes of `prompt`, up to each rung; zeros behind its end."""
    hashed, chain, at = xxh3_64(), b"", 0
    for rung in _RUNGS:
        if at >= len(prompt):
            break
        hashed.update(prompt[at:rung])
        at = rung
        chain += hashed.digest()
    return chain.ljust(_KEY_BYTES - 4, b"\0")


def _run(keys: bytearray, places: bytearray, scratch: Path) -> BinaryIO:
    """A temporary file of keys with their places, sorted; lines with one key stay in the file's order."""
    rows = np.frombuffer(bytes(keys), dtype=f"S{_KEY_BYTES}")
    whole = np.frombuffer(bytes(places), dtype=f"V{_PLACE.size}")
    # numpy lets other threads run meanwhile, as Python's own sort does not
    order = np.argsort(rows, kind="stable")
    file = _temporary(scratch)
    keyed = np.empty(len(rows), dtype=[("key", f"V{_KEY_BYTES}"), ("place", f"V{_PLACE.size}")])
    keyed["key"], keyed["place"] = np.frombuffer(bytes(keys), dtype=f"V{_KEY_BYTES}")[order], whole[order]
    file.write(keyed.tobytes())
    return file


def _merged(runs: Sequence[BinaryIO], scratch: Path, pace: Pace, models: tuple[str, ...]) -> LineOrder:
    file, count = _temporary(scratch), 0
    try:
        for row in pace.through(heapq.merge(*map(_rows, runs), key=lambda row: row[:_KEY_BYTES])):
            file.write(row[_KEY_BYTES:])
            count += 1
        file.flush()
    except BaseException:
        file.close()
        raise
    return LineOrder(file, models, count)


def _rows(run: BinaryIO) -> Iterator[bytes]:
    size = _KEY_BYTES + _PLACE.size
    run.seek(0)
    while block := run.read(size * _AT_ONCE):
        for at in range(0, len(block), size):
            yield block[at : at + size]


def _temporary(scratch: Path) -> BinaryIO:
    return tempfile.TemporaryFile(dir=scratch)

"""Header fields: as they came, by name, and as they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

Lines = Mapping[str, str] | bytes
"""Fields to send: by name, or as `header_lines` made them before."""

_FRAMING = frozenset({"connection", "content-length", "date", "transfer-encoding"})


class Headers(Mapping[str, str]):
    """The fields of a message by name, in any case. Fields of one name are one value, as RFC 9110 joins them (5.2).

    `raw` are the fields as they came, `lowered` all of them by lower-case name; neither may be changed. Bytes outside
    of ASCII are read as UTF-8, or kept as surrogates.
    """

    __slots__ = ("lowered", "raw")

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self.raw, by_name = raw, dict[str, str]()
        for raw_name, raw_value in raw:
            name, value = _lowered(raw_name), raw_value.strip(b" \t").decode("utf-8", "surrogateescape")
            by_name[name] = f"{by_name[name]}, {value}" if name in by_name else value
        self.lowered = by_name

    def __repr__(self) -> str:
        # values may be keys
        return f"<Headers {', '.join(self)}>"

    def __getitem__(self, name: str) -> str:
        return self.lowered[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.lowered)

    def __len__(self) -> int:
        return len(self.lowered)


@lru_cache(maxsize=512)
def _lowered(name: bytes) -> str:
    return name.lower().decode("ascii")


def lines_of(fields: Lines) -> bytes:
    """`fields` as they are sent."""
    return fields if isinstance(fields, bytes) else header_lines(fields.items())


def header_lines(fields: Iterable[tuple[str, str]]) -> bytes:
    """`fields` as they are sent, each with its line end.

    Raises ValueError for a line break or a NUL in a field, which would begin another one, and for names that say how a
    message is framed: its sender writes those.
    """
    count, lines = 0, []
    for name, value in fields:
        if name.lower() in _FRAMING:
            raise ValueError(f"the header {name} is not the caller's to set")
        lines.append(f"{name}: {value}\r\n")
        count += 1
    text = "".join(lines)
    if text.count("\n") != count or text.count("\r") != count or "\0" in text:
        raise ValueError("a header with a line break or a NUL")
    return text.encode(errors="surrogateescape")

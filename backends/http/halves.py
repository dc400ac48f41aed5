"""Characters beyond U+FFFF that a server cut into halves, one at the end of a piece and one at the beginning of the
next. Pure but for its own memory.
"""

from __future__ import annotations

import re

# a backslash behind an odd number of others is text
_FIRST_AT_END = re.compile(rb'(?<!\\)((?:\\\\)*)(\\u[dD][89abAB][0-9a-fA-F]{2})(?=")')
_SECOND_AT_BEGIN = re.compile(rb'(?<!\\)"(?=\\u[dD][c-fC-F][0-9a-fA-F]{2})')

_MOST_BYTES = 256 << 10
"""In larger values nothing is looked for: 1 MB takes 55 ms, and pieces that cut a character are small."""


class Halves:
    """Moves the first halves at the ends of texts in one JSON value to the second ones in the next value of a stream.

    A first half without its second one in the next value is left out.
    """

    def __init__(self) -> None:
        self._firsts: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Halves {len(self._firsts)} wait>"

    def joined(self, data: bytes) -> bytes:
        """`data`, the next JSON value, with whole characters."""
        if len(data) > _MOST_BYTES or (b"\\ud" not in data and b"\\uD" not in data):
            self._firsts = []
            return data
        firsts = iter(self._firsts)
        data = _SECOND_AT_BEGIN.sub(lambda quote: quote[0] + next(firsts, b""), data)
        self._firsts = []
        return _FIRST_AT_END.sub(self._taken, data)

    def _taken(self, found: re.Match[bytes]) -> bytes:
        self._firsts.append(found[2])
        return found[1]

"""Where a body in chunks ends (RFC 9112, section 7.1): sizes are read here, and all bytes are judged by the parser.

A parser that is given more than one message does not tell where the first one ended. Empty lines do not tell that
either: a chunk may be full of them.
"""

from __future__ import annotations

import re

from http1.message import EMPTY_LINE, until_empty_line

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16}+)(?:;[^\r\n]*+)?\r\n")


class ChunkedEnd:
    """Fed with a body in chunks, finds its end. Looks at sizes and trailers; data of chunks is passed over.

    It `is_found` once all of it came, with so many lines of `trailers`, the empty one included, and their bytes. Behind
    a line that has no size, it never is: the parser refuses the body.
    """

    __slots__ = ("_before", "_in_trailers", "_is_lost", "_left", "_line", "is_found", "trailer_bytes", "trailers")

    def __init__(self) -> None:
        # bytes of a chunk and its line end that have not come
        self._left = 0
        # what came of a line with a size
        self._line = bytearray()
        self._in_trailers, self._before = False, b""
        self.is_found = self._is_lost = False
        self.trailers = self.trailer_bytes = 0

    def __repr__(self) -> str:
        return f"<ChunkedEnd {'in trailers' if self._in_trailers else f'{self._left} bytes ahead'}>"

    def within(self, data: bytes) -> int:
        """How many of the next bytes, which are `data`, belong to the body; all of them if it goes on."""
        at, end, self._left = self._left, len(data), 0
        if self._is_lost:
            return end
        while not self._in_trailers:
            if at >= end:
                self._left = at - end
                return end
            if self._line or (found := _SIZE_LINE.match(data, at)) is None:
                # a line that is cut
                newline = data.find(b"\n", at) + 1
                self._line += data[at : newline or end]
                if not newline:
                    return end
                at = newline
                found, self._line = _SIZE_LINE.fullmatch(self._line), bytearray()
                if found is None:
                    self._is_lost = True
                    return end
            else:
                at = found.end()
            if size := int(found[1], 16):
                at += size + len(b"\r\n")
            else:
                # trailers end with an empty line, which may follow at once
                self._in_trailers, self._before = True, b"\r\n"
        rest = data[at:]
        length = until_empty_line(self._before, rest)
        self.trailers += rest.count(b"\n", 0, length)
        self.trailer_bytes += length
        last = self._before + rest[:length]
        self.is_found, self._before = last.endswith(EMPTY_LINE), last[1 - len(EMPTY_LINE) :]
        return at + length

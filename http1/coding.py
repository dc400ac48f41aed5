"""Content codings (RFC 9110, section 8.4.1): bodies that were sent compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from http1.errors import BodyTooLarge

CODINGS = ("identity", "gzip", "deflate")
"""Those that are read, by the names that Content-Encoding has."""

PIECE_BYTES = 64 << 10
"""What is decoded at once, at most."""

_FED_BYTES = 1 << 10

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class BadCoding(Exception):
    """Bytes that are not what Content-Encoding says."""


class Decoder:
    """Fed with a body of one of CODINGS, gives what it says, of at most `most_bytes`."""

    def __init__(self, coding: str, most_bytes: int) -> None:
        self._coding, self._most_bytes = coding, most_bytes
        self._size = 0
        self._inflate = zlib.decompressobj(_WINDOWS[coding]) if coding in _WINDOWS else None
        self._has_begun = False

    def __repr__(self) -> str:
        return f"<Decoder of {self._coding}, {self._size} bytes>"

    def feed(self, data: bytes) -> bytes:
        """What `data` adds. Raises BadCoding, BodyTooLarge."""
        return b"".join(self.pieces(data))

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What `data` adds, in pieces of at most PIECE_BYTES: a byte stands for a thousand. Raises as `feed`."""
        if self._inflate is None:
            yield self._counted(data)
            return
        # what does not fit into a piece is copied for each one
        for at in range(0, len(data), _FED_BYTES):
            rest = data[at : at + _FED_BYTES]
            while rest:
                output, rest = self._inflated(rest)
                if output:
                    yield self._counted(output)

    def _counted(self, output: bytes) -> bytes:
        self._size += len(output)
        if self._size > self._most_bytes:
            raise BodyTooLarge(self._most_bytes)
        return output

    def end(self) -> None:
        """The body is over. Raises BadCoding if something is missing."""
        if self._inflate is not None and self._has_begun and not self._inflate.eof:
            raise BadCoding(f"the body ends in the middle of its {self._coding}")

    def _inflated(self, data: bytes) -> tuple[bytes, bytes]:
        """A piece of what `data` says, and the rest of `data`."""
        assert self._inflate is not None
        if not self._has_begun:
            self._has_begun = True
            if self._coding == "deflate" and data[0] & 0x0F != 8:
                # without the wrapper of zlib, as some programs send it
                self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            output = self._inflate.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise BadCoding(f"the body is no {self._coding}") from error
        if self._inflate.unused_data:
            # a second member of gzip too: many empty ones would cost a copy of the body each
            raise BadCoding(f"the body goes on after the end of its {self._coding}")
        return output, self._inflate.unconsumed_tail


def decoded(body: bytes, coding: str, most_bytes: int) -> bytes:
    """What a whole `body` of one of CODINGS says. Raises BadCoding, BodyTooLarge."""
    decoder = Decoder(coding, most_bytes)
    whole = decoder.feed(body)
    decoder.end()
    return whole

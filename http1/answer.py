"""What a server answers, as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any

from http1.coding import CODINGS, BadCoding, Decoder
from http1.errors import BadAnswer, BodyTooLarge
from http1.headers import Headers
from http1.incoming import Incoming


class Answer:
    """The answer of a server, at its body. A context manager: left before its end, it closes the connection.

    The body comes as it was sent unless `decode` was called.
    """

    __slots__ = ("_abort", "_decoder", "_incoming", "headers", "status")

    def __init__(self, status: int, headers: Headers, incoming: Incoming, abort: Callable[[], None]) -> None:
        self.status, self.headers = status, headers
        self._incoming, self._abort = incoming, abort
        self._decoder: Decoder | None = None

    def __repr__(self) -> str:
        return f"<Answer {self.status}, {self._incoming!r}>"

    @property
    def is_whole(self) -> bool:
        """Did all of it come, read or not?"""
        return self._incoming.is_ended

    def decode(self, most_bytes: int) -> None:
        """Have the body read as its Content-Encoding says, to at most `most_bytes`. Raises BadAnswer where that is
        neither gzip nor deflate.
        """
        coding = self.headers.get("content-encoding", "identity").lower()
        if coding not in CODINGS:
            raise BadAnswer(f"the answer is encoded as '{coding[:40]}'")
        self._decoder = None if coding == "identity" else Decoder(coding, most_bytes)

    def read(self) -> Coroutine[Any, Any, bytes]:
        """What came since the last time; nothing at the end. Raises AnswerError."""
        return self._incoming.read() if self._decoder is None else self._decoded(self._decoder)

    async def _decoded(self, decoder: Decoder) -> bytes:
        try:
            while data := await self._incoming.read():
                if decoded := decoder.feed(data):
                    return decoded
            decoder.end()
        except (BadCoding, BodyTooLarge) as error:
            raise BadAnswer(str(error)) from error
        return b""

    async def content(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises AnswerError."""
        while data := await self.read():
            yield data

    async def pour(self, into: Callable[[bytes], bool]) -> bool:
        """Give `into` the body as it comes, in the moment that it comes, until that returns False: is this the end?

        Raises AnswerError, and what `into` raises.
        """
        if self._decoder is None:
            return await self._incoming.pour(into)
        while data := await self.read():
            if not into(data):
                return False
        return True

    async def body(self, most_bytes: int) -> bytes:
        """All of the body. Raises AnswerError; BadAnswer for more than `most_bytes`."""
        pieces, size = [], 0
        while data := await self.read():
            pieces.append(data)
            size += len(data)
            if size > most_bytes:
                raise BadAnswer(f"the answer is larger than {most_bytes} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fail(self, error: Exception) -> None:
        """Have readers of the body get `error` after what came before, and close the connection."""
        if not self._incoming.is_ended:
            self._incoming.fail(error)
            self._abort()

    def close(self) -> None:
        """Close the connection unless all of the answer came, in which case it serves other requests already."""
        if not self._incoming.is_ended:
            self._abort()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

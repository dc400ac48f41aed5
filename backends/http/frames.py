"""Messages that one byte separates, however they are cut: JSON lines (newline) and FastChat's frames (NUL)."""

from __future__ import annotations

from backends.nesting import MOST_AT_ONCE, has_many_values
from policies.errors import BackendErred


class FrameDecoder:
    """Takes bytes, returns whole messages. The last need not end with `separator`: `rest` has it.""

    Empty messages are skipped. A message is at most `limit_bytes` long, and has few enough values to be
    decoded at once.
    """

    def __init__(self, separator: bytes = b"\n", limit_bytes: int = 4 << 20) -> None:
        self._separator, self._limit_bytes = separator, limit_bytes
        self._parts: list[bytes] = []
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<FrameDecoder {self._bytes} bytes of a message>"

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises BackendFailed if one is too long."""
        first, *others = data.split(self._separator)
        self._hold(first)
        frames = []
        for piece in others:
            frames.append(self.rest())
            self._hold(piece)
        return [frame for frame in frames if frame.strip()]

    def rest(self) -> bytes:
        """The bytes after the last separator, which are then dropped."""
        frame = b"".join(self._parts)
        self._parts, self._bytes = [], 0
        if has_many_values(frame):
            raise BackendErred(f"a message of the stream has more than {MOST_AT_ONCE} values")
        return frame

    def _hold(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes > self._limit_bytes:
            raise BackendErred(f"a message of the stream is longer than {self._limit_bytes} bytes")
        self._parts.append(piece)

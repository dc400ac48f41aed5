"""A connection between two processes of a shard: whole messages of bytes, over a pair of sockets."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")

MOST_BYTES = 1 << 28
"""A longer message is a defect: the largest one lists the blocks and tokens of a step."""


class LinkBroken(Exception):
    """The other process has ended, or does not read."""


class PartLink:
    """One end. `send` waits at most `waits_s` for the other end to read; `receive` waits until it writes or ends."""

    def __init__(self, connection: socket.socket, *, waits_s: float) -> None:
        self._connection = connection
        # receiving has no limit of its own: a process may be idle for hours, and its end closes the connection
        seconds, rest = divmod(waits_s, 1)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def __repr__(self) -> str:
        return f"PartLink({self._connection.fileno()})"

    def send(self, message: bytes) -> None:
        """Send `message`. Raises LinkBroken, ValueError if it is too long."""
        if len(message) > MOST_BYTES:
            raise ValueError(f"a message of {len(message)} bytes; at most {MOST_BYTES} can be sent")
        try:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise LinkBroken(f"another process of this shard has ended, or does not read: {error}") from error

    def receive(self) -> bytes | None:
        """The next message; None if the other process has ended, or sends what is none."""
        head = self._exactly(_LENGTH.size)
        size = MOST_BYTES + 1 if head is None else _LENGTH.unpack(head)[0]
        return self._exactly(size) if size <= MOST_BYTES else None

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _exactly(self, count: int) -> bytes | None:
        received = bytearray()
        while len(received) < count:
            try:
                piece = self._connection.recv(count - len(received))
            except OSError:
                return None
            if not piece:
                return None
            received += piece
        return bytes(received)

"""A client that has connected and gets its transport, which takes the event loop a moment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable


class Abortable(asyncio.Protocol):
    """A protocol that can close its connection, also before it has one."""

    def abort(self) -> None:
        """Close the connection at once."""
        raise NotImplementedError


class Greeting:
    """Makes `protocol` serve the client at `connected`; `on_end` is called once it is served or gone."""

    def __init__(self, connected: socket.socket, protocol: Abortable, *, on_end: Callable[[], None]) -> None:
        self._connected, self._protocol, self._on_end = connected, protocol, on_end
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)

    def __repr__(self) -> str:
        return f"<Greeting of {self._protocol!r}>"

    def abort(self) -> None:
        """Close the connection."""
        self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # perhaps before its first step
            self._connected.close()
        self._on_end()

    async def _run(self) -> None:
        # whatever keeps a client from being served is its own affair, and there is much of it on a public port
        with contextlib.suppress(OSError):
            try:
                await asyncio.get_running_loop().connect_accepted_socket(lambda: self._protocol, self._connected)
            except BaseException:
                # the transport may have been made in this moment
                self._protocol.abort()
                self._connected.close()
                raise

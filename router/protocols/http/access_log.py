"""The access log: a line for each request over HTTP, when it has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from http1.errors import ClientGone, HttpError
from http1.request import Handler, Reply, Request, Response
from shards.logs import LogFields

ACCESS = "pointsman.access"

CLIENT_GONE = 499
"""The status of a request with a client that left before the end of its answer, as in nginx's log."""

_NAMED = {"x-pointsman-tenant": "tenant", "x-pointsman-class": "class", "x-pointsman-backend": "backend"}
_ID = "x-request-id"

_log = logging.getLogger(ACCESS)


class _Line(LogFields):
    """Its text is for people, and for programs that read logs of web servers."""

    __slots__ = ()

    def __str__(self) -> str:
        of = self.values
        where = " ".join(str(of[name]) for name in (*_NAMED.values(), "request") if name in of)
        return f'{of["client"]} "{of["method"]} {of["path"]}" {of["status"]} {of["ms"]} ms {where}'.rstrip()


class AccessLog:
    """Answers as `handler` does, and logs each request with its status and time. Nothing of its query or body."""

    def __init__(self, handler: Handler, clock: Callable[[], float] = time.perf_counter) -> None:
        self._handler, self._clock = handler, clock

    def __repr__(self) -> str:
        return f"<AccessLog of {self._handler!r}>"

    @staticmethod
    def is_wanted() -> bool:
        """Whether the log has these lines."""
        return _log.isEnabledFor(logging.INFO)

    async def answer(self, request: Request) -> Reply:
        began = self._clock()
        status = 500
        names: dict[str, str] = {}
        try:
            reply = await self._handler(request)
            status, names = _head_of(reply)
            return reply
        except HttpError as error:
            status = error.status
            raise
        except (ClientGone, asyncio.CancelledError):
            status = CLIENT_GONE
            names = {} if request.stream is None else _head_of(request.stream)[1]
            raise
        finally:
            line = {"client": request.address, "method": request.method, "path": request.path, "status": status}
            line["ms"] = round((self._clock() - began) * 1000)
            _log.info(_Line({**line, **names}))


def _head_of(reply: Reply) -> tuple[int, dict[str, str]]:
    """Status, and the names that the head of `reply` has."""
    if isinstance(reply, Response):
        if isinstance(reply.headers, Mapping):
            return reply.status, _names({name.lower(): value for name, value in reply.headers.items()})
        return reply.status, _names(_fields(reply.headers.split(b"\r\n")))
    first, *lines = reply.head.split(b"\r\n")
    return int(first.split(b" ", 2)[1]), _names(_fields(lines))


def _fields(lines: list[bytes]) -> dict[str, str]:
    pairs = (line.decode("latin-1").partition(":") for line in lines)
    return {name.lower(): value.strip() for name, colon, value in pairs if colon}


def _names(headers: Mapping[str, str]) -> dict[str, str]:
    known = {ours: headers[name] for name, ours in _NAMED.items() if name in headers}
    return {**known, "request": headers[_ID]} if _ID in headers else known

"""Server-sent events from bytes, however they are cut. Source: WHATWG HTML, section 9.2."""

from __future__ import annotations

import re
from typing import NamedTuple

from policies.errors import BackendFailed

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its data, lines joined by a newline, and its name ("message" if it has none)."""

    data: bytes
    name: str = "message"


class SseDecoder:
    """Feed it bytes, get whole events. An event that the end of the stream cuts off is none.

    Lines, and the data of one event, are at most `limit_bytes` long.
    """

    def __init__(self, limit_bytes: int = 4 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""
        self._after_cr = False
        self._is_first_line = True
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = ""

    def __repr__(self) -> str:
        return f"<SseDecoder {len(self._rest)} bytes of a line, {len(self._data)} lines of an event>"

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes. Raises BackendFailed if a line or an event is too long."""
        if not data:
            return []
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r") if data else False
        *lines, self._rest = _LINE_END.split(self._rest + data)
        self._refuse_if_long(len(self._rest))
        return [event for line in lines if (event := self._read(line)) is not None]

    def _read(self, line: bytes) -> Event | None:
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_bytes += len(value)
            self._refuse_if_long(self._data_bytes)
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode(errors="replace")
        return None

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._data_bytes, self._name = [], 0, ""
        return Event(b"\n".join(data), name or "message") if data else None

    def _refuse_if_long(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise BackendFailed(f"a line or event of the stream is longer than {self._limit_bytes} bytes")

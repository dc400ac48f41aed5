"""What a client asks on one connection, in order: bytes go in, requests come out. It knows neither sockets nor time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from http1.errors import BadRequest, BodyTooLarge, HeadTooLarge, HttpError
from http1.headers import Headers
from http1.incoming import Incoming
from http1.limits import ServerLimits
from http1.request import Request

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Those that handlers see. The parser knows more, of other protocols."""

Make = Callable[[str, str, Headers], Request]
"""(method, target, headers) -> a request without a body yet."""


class Requests:
    """`waiting` are the requests that have a complete head, and an HttpError where nothing more can be understood.

    The parser calls the methods that begin with on_. After bytes that it does not understand, or that another program
    could understand differently, it `is_deaf`: where the next request would begin is not known.
    """

    def __init__(self, limits: ServerLimits, make: Make) -> None:
        self.waiting: deque[Request | HttpError] = deque()
        self.is_in_head = self.is_deaf = False
        self.incoming: Incoming | None = None
        """The body that is not complete."""
        self.body_bytes = 0
        """So much of it came."""
        self._limits = limits
        self._make: Make | None = make
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._target, self._fields, self._head_bytes = b"", list[tuple[bytes, bytes]](), 0
        self._unseen_bytes = 0
        self._upgrading: Request | None = None

    def __repr__(self) -> str:
        return f"<Requests {len(self.waiting)} waiting{', deaf' if self.is_deaf else ''}>"

    def feed(self, data: bytes) -> None:
        """`data` came."""
        while data and not self.is_deaf:
            self._unseen_bytes += len(data)
            rest = b""
            assert self._parser is not None
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                rest = data[upgrade.args[0] :]
                self._read_on_without_upgrade()
            except HttpParserError as error:
                ours = error.__context__
                self.refuse(ours if isinstance(ours, HttpError) else BadRequest(str(error)))
            if self._unseen_bytes > self._limits.head_bytes:
                # what the parser keeps of a field without having told of it
                self.refuse(HeadTooLarge(f"{self._limits.head_bytes} bytes"))
            data = rest

    def refuse(self, error: HttpError) -> None:
        """Understand no more, because of `error`."""
        incoming = self.incoming
        self.stop()
        if incoming is None:
            self.waiting.append(error)
            return
        incoming.fail(error)
        if self.waiting and isinstance(error, BadRequest):
            # its handler has not begun, and does not have to
            self.waiting[-1] = error

    def stop(self) -> None:
        """Understand no more."""
        self.is_deaf, self.is_in_head, self.incoming, self._unseen_bytes = True, False, None, 0
        # both refer back to this connection: a crowd of closed ones would wait for the garbage collector, which takes
        # more than 100 ms for them
        self._parser = self._make = None

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.waiting) >= self._limits.waiting and self._upgrading is None:
            raise BadRequest(f"more than {self._limits.waiting} requests were sent ahead")
        self.is_in_head, self._target, self._fields = True, b"", []
        self._head_bytes = self.body_bytes = self._unseen_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of the target came."""
        self._target += url
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.head_bytes:
            raise HeadTooLarge(f"{self._limits.head_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came; or a trailer, which is dropped."""
        self._fields.append((name, value))
        if len(self._fields) > self._limits.headers:
            raise HeadTooLarge(f"{self._limits.headers} headers")
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._limits.head_bytes:
            raise HeadTooLarge(f"{self._limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        """A head is complete: its request waits for its turn."""
        if self._upgrading is None:
            request = self._request()
            self.waiting.append(request)
        else:
            request, self._upgrading = self._upgrading, None
        self.is_in_head, self._fields, self._unseen_bytes = False, [], 0
        self.incoming = request.incoming
        if (request.content_length or 0) > self._limits.body_bytes:
            raise BodyTooLarge(self._limits.body_bytes)

    def on_body(self, data: bytes) -> None:
        """A part of the body came."""
        assert self.incoming is not None
        self._unseen_bytes = 0
        self.body_bytes += len(data)
        if self.body_bytes > self._limits.body_bytes:
            raise BodyTooLarge(self._limits.body_bytes)
        self.incoming.put(data)

    def on_message_complete(self) -> None:
        """A request is complete."""
        # the body of one that asks for an upgrade follows what the parser takes for its end
        assert self._parser is not None
        if self.incoming is not None and not self._parser.should_upgrade():
            self.incoming.end()
            self.incoming = None
            self._unseen_bytes = 0

    def _request(self) -> Request:
        """The request of a head. Raises HttpError for one that is not served, or that could be read in two ways."""
        parser, make, headers = self._parser, self._make, Headers(self._fields)
        assert parser is not None
        assert make is not None
        method, version, fields = parser.get_method().decode(), parser.get_http_version(), headers.lowered
        if version not in ("1.0", "1.1"):
            raise HttpError(505, "HTTP/1.1 is spoken here")
        if method not in METHODS:
            raise HttpError(501, f"{method} is not served here")
        is_http_10, host = version == "1.0", fields.get("host")
        if "," in host if host is not None else not is_http_10:
            raise BadRequest("a request names one host")
        if (coding := fields.get("transfer-encoding")) is not None and (is_http_10 or coding.lower() != "chunked"):
            raise BadRequest("a body is sent with its length, or chunked and in no other coding")
        if (expected := fields.get("expect")) is not None and expected.lower() != "100-continue":
            raise HttpError(417, "nothing but 100-continue can be expected")
        request = make(method, self._target.decode("ascii"), headers)
        if (length := fields.get("content-length")) is not None:
            request.content_length = int(length)
        request.is_http_10, request.keeps_alive = is_http_10, parser.should_keep_alive()
        request.waits_for_continue = expected is not None and not is_http_10
        return request

    def _read_on_without_upgrade(self) -> None:
        """Take a request that asks for another protocol as one that does not.

        The parser stops after its head. A new one goes on with a head that frames the same body.
        """
        request = self.waiting[-1]
        assert isinstance(request, Request)
        self._upgrading = request
        framing = "Transfer-Encoding: chunked"
        if "transfer-encoding" not in request.headers:
            framing = f"Content-Length: {request.content_length or 0}"
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())

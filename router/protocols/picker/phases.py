"""One HTTP request of a gateway, phase by phase, with the answers that need no decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from policies.errors import RequestTooLarge
from policies.quantities import digits
from router.call.disclosure import shown_name
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.messages import Answer, Modes, go_on, headers_in, modes_of, passed_on, served_in, subset_in

MOST_WAITING_PIECES = 64
"""Most pieces of a response that wait to be parsed, each at most 64 KiB as Envoy cuts them; then the gateway waits."""

Say = Callable[[Answer], Awaitable[None]]


class OutOfOrder(Exception):
    """A message of the gateway is out of order. The error's text is for the gateway's operator."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of the request. `subset` has the endpoints that the gateway allows, None for all."""

    headers: Mapping[str, str]
    subset: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The head of the response, and the endpoint that it came from, if the gateway reports it."""

    status: int
    headers: Mapping[str, str]
    served: str | None


class Pieces:
    """The body of a response on its way to its reader. Bounded: the writer waits if the reader is slow."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING_PIECES)
        self._is_left = False
        self.is_ended = False

    def __repr__(self) -> str:
        return f"<Pieces {self._queue.qsize()} waiting{', ended' if self.is_ended else ''}>"

    async def put(self, piece: bytes) -> None:
        """One more piece."""
        if piece and not self._is_left:
            await self._queue.put(piece)

    def end(self) -> None:
        """Mark the end. Does not wait until the reader has reached it."""
        self.is_ended = True
        if self._queue.empty():
            self._queue.put_nowait(None)

    async def get(self) -> bytes | None:
        """The next piece; None at the end."""
        return None if self.is_ended and self._queue.empty() else await self._queue.get()

    def leave(self) -> None:
        """The reader has left: the writer never waits again."""
        self._is_left = True
        while not self._queue.empty():
            self._queue.get_nowait()


class Phases:
    """Takes a gateway's messages in their order, and gives `head`, the whole `body`, the `response` and its `pieces`.

    `say` answers messages that need no decision at once, so that an answer passes even if it cannot be parsed.
    `adds` are headers for the response, `names` the backends of the offered endpoints. `on_early` is
    called if a response comes before the request was sent on: the gateway gave up on it and answered by itself.
    """

    def __init__(self, say: Say, *, most_bytes: int, on_early: Callable[[], None]) -> None:
        self.say, self._most_bytes, self._on_early = say, most_bytes, on_early
        self.modes = Modes()
        self.head: Head | None = None
        self.ended_by: str | None = None
        self.is_sent = False
        self.adds: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.pieces = Pieces()
        loop = asyncio.get_running_loop()
        self.body: asyncio.Future[bytes] = loop.create_future()
        self.response: asyncio.Future[ResponseHead] = loop.create_future()
        self._raw = bytearray()

    def __repr__(self) -> str:
        return f"<Phases {len(self._raw)} bytes, ended by {self.ended_by}, {'sent' if self.is_sent else 'not sent'}>"

    async def take(self, message: pb.ProcessingRequest) -> None:
        """Process one message. Raises OutOfOrder."""
        phase = message.WhichOneof("request")
        if phase is None:
            raise OutOfOrder("the message has no known part")
        if (self.head is None) != (phase == "request_headers"):
            raise OutOfOrder(f"{phase} came {'before' if self.head is None else 'after'} request_headers")
        await getattr(self, f"_{phase}")(message)

    async def _request_headers(self, message: pb.ProcessingRequest) -> None:
        try:
            self.modes, headers = modes_of(message), headers_in(message.request_headers.headers)
        except ValueError as error:
            raise OutOfOrder(str(error)) from None
        self.head = Head(headers, subset_in(message))
        if message.request_headers.end_of_stream:
            self._end_request("headers")
        elif not self.modes.is_duplex:
            # the body comes only after this answer
            await self.say(go_on("request_headers"))

    async def _request_body(self, message: pb.ProcessingRequest) -> None:
        if self.ended_by is not None:
            raise OutOfOrder(f"request_body came after the {self.ended_by} that ended the request")
        piece = message.request_body
        if len(self._raw) + len(piece.body) <= self._most_bytes:
            self._raw += piece.body
        elif not self.body.done():
            hint = "shorten the prompt, or raise server.max_body"
            self.body.set_exception(RequestTooLarge(f"the body is larger than {self._most_bytes} bytes", hint=hint))
            # a call that was rejected before never asks for the body
            self.body.exception()
        if piece.end_of_stream or not self.modes.is_duplex:
            self._end_request("body")

    async def _request_trailers(self, message: pb.ProcessingRequest) -> None:  # noqa: ARG002
        if self.ended_by is None:
            self._end_request("trailers")
        else:
            await self.say(go_on("request_trailers"))

    async def _response_headers(self, message: pb.ProcessingRequest) -> None:
        if self.response.done():
            raise OutOfOrder("response_headers came twice")
        try:
            headers = headers_in(message.response_headers.headers)
        except ValueError as error:
            raise OutOfOrder(str(error)) from None
        status = headers.get(":status", "")
        served = served_in(message)
        self.response.set_result(ResponseHead(digits(status, most=999) or 0, headers, served))
        if not self.is_sent:
            self._on_early()
        elif (backend := self.names.get(served or next(iter(self.names)))) is not None:
            self.adds["x-pointsman-backend"] = shown_name(backend)
        await self.say(go_on("response_headers", self.adds))
        if message.response_headers.end_of_stream:
            self.pieces.end()

    async def _response_body(self, message: pb.ProcessingRequest) -> None:
        self._require_response("response_body")
        await self.say(passed_on(message.response_body, self.modes))
        await self.pieces.put(message.response_body.body)
        if message.response_body.end_of_stream:
            self.pieces.end()

    async def _response_trailers(self, message: pb.ProcessingRequest) -> None:  # noqa: ARG002
        self._require_response("response_trailers")
        await self.say(go_on("response_trailers"))
        self.pieces.end()

    def _require_response(self, phase: str) -> None:
        if not self.response.done():
            raise OutOfOrder(f"{phase} came before response_headers")
        if self.pieces.is_ended:
            raise OutOfOrder(f"{phase} came after the end of the response")

    def _end_request(self, by: str) -> None:
        self.ended_by = by
        if not self.body.done():
            self.body.set_result(bytes(self._raw))

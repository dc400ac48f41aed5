"""Envoy with external processing and an endpoint picker, built from the documents of its filter as of 1.40.

Speaks the documented order of messages to a picker, does what it answers to a real HTTP request, sends that to the
endpoint that it named, and lets the picker hear the response. Sources: `external_processor.proto`, the filter's
`processing_mode.proto`, the `override_host` load balancing policy, and the endpoint picker protocol 1.0.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import grpc

from router.protocols.picker.envoy import base_pb2 as core
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.envoy.external_processor_pb2_grpc import ExternalProcessorStub
from router.protocols.picker.envoy.processing_mode_pb2 import ProcessingMode

T = TypeVar("T")

DESTINATION = "x-gateway-destination-endpoint"
DUPLEX, BUFFERED, STREAMED = (
    ProcessingMode.FULL_DUPLEX_STREAMED,
    ProcessingMode.BUFFERED,
    ProcessingMode.STREAMED,
)


@dataclass
class Reply:
    """The gateway's answer to its client; `sent_to` are the endpoints that were tried, the last one answered."""

    status: int
    headers: dict[str, str]
    body: bytes
    sent_to: list[str] = field(default_factory=list)
    sent_body: bytes = b""
    sent_headers: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


class Refused(Exception):
    """The picker answered in the place of an endpoint."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply))
        self.reply = reply


@dataclass(eq=False)
class Envoy:
    """One listener with the filter. `cut` is the size in which request bodies arrive; `metadata` is that of the route.

    `picked` is set once it knows where to go; it reaches none of `unreachable`. `reports_served`: it reports the
    endpoint that served. `trailers`: the client sends some; it leaves when it has read this (`leaves_at`).
    `timeout_s` is what the stream to the picker may take.
    """

    picker: str
    request_mode: int = DUPLEX
    response_mode: int = DUPLEX
    reports_modes: bool = True
    cut: int = 1 << 16
    metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reports_served: bool = True
    trailers: bool = False
    picked: asyncio.Event = field(default_factory=asyncio.Event)
    unreachable: set[str] = field(default_factory=set)
    leaves_at: bytes | None = None
    timeout_s: float | None = None

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Any]:
        """A stream of the filter's own, for what no gateway would say."""
        async with grpc.aio.insecure_channel(self.picker) as channel:
            stub: Any = ExternalProcessorStub(channel)  # type: ignore[no-untyped-call]
            yield stub.Process(timeout=self.timeout_s)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """One request of a client, to the end of its response."""
        async with self.stream() as call:
            stream = _Stream(call)
            try:
                return await self._forwarded(stream, path, body, dict(headers))
            except Refused as refused:
                # the call may have reached its deadline meanwhile
                with suppress(grpc.aio.InternalError):
                    await call.done_writing()
                return refused.reply
            finally:
                stream.close()

    async def _forwarded(self, stream: _Stream, path: str, body: bytes, headers: dict[str, str]) -> Reply:
        pseudo = {":method": "POST", ":path": path, ":authority": "gateway", ":scheme": "http"}
        await stream.write(self.first({**pseudo, **headers}, is_last=False))
        answer, sent = await self._exchanged_body(stream, body)
        common = answer.request_headers.response if answer.HasField("request_headers") else answer.request_body.response
        for set_header in common.header_mutation.set_headers:
            assert set_header.append_action == core.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
            headers[set_header.header.key] = set_header.header.raw_value.decode()
        for name in common.header_mutation.remove_headers:
            headers.pop(name, None)
        metadata = {key: dict(value) for key, value in dict(answer.dynamic_metadata).items()}
        assert metadata["envoy.lb"][DESTINATION] == headers[DESTINATION], "header and metadata differ"
        self.picked.set()
        return await self._answered(stream, path, sent, headers, metadata)

    async def _exchanged_body(self, stream: _Stream, body: bytes) -> tuple[Any, bytes]:
        """The answer that names the endpoint, and the body as the picker wants it."""
        pieces = [body[at : at + self.cut] for at in range(0, max(1, len(body)), self.cut)]
        if self.request_mode == BUFFERED:
            assert (await stream.read()).HasField("request_headers")
            await stream.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)))
            answer = await stream.read()
            mutation = answer.request_body.response.body_mutation
            return answer, mutation.body if mutation.HasField("body") else body
        for at, piece in enumerate(pieces):
            last = at == len(pieces) - 1 and not self.trailers
            await stream.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=last)))
        if self.trailers:
            await stream.write(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
        answer = await stream.read()
        assert answer.HasField("request_headers"), answer
        sent, is_last = b"", False
        while not is_last:
            reply_part = await stream.read()
            if reply_part.HasField("request_trailers"):
                break
            piece = reply_part.request_body.response.body_mutation.streamed_response
            sent, is_last = sent + piece.body, piece.end_of_stream
            assert len(piece.body) <= 1 << 16
        assert is_last != self.trailers
        return answer, sent

    async def _answered(
        self, stream: _Stream, path: str, body: bytes, headers: dict[str, str], metadata: dict[str, Any]
    ) -> Reply:
        endpoints = headers[DESTINATION].split(",")
        tried: list[str] = []
        async with aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=["accept-encoding"]) as http:
            for endpoint in endpoints:
                tried.append(endpoint)
                if endpoint not in self.unreachable:
                    sending = http.post(f"http://{endpoint}{path}", data=body, headers=headers)
                    upstream = await stream.unless_refused(sending)
                    break
            else:
                plain = {"content-type": "text/plain"}
                return await self._reported(stream, 503, plain, _once(b"no healthy upstream"), tried)
            async with upstream:
                named = {name.lower(): value for name, value in upstream.headers.items()}
                reply = await self._reported(stream, upstream.status, named, upstream.content.iter_any(), tried)
        reply.sent_body, reply.sent_headers, reply.metadata = body, headers, metadata
        return reply

    async def _reported(
        self,
        stream: _Stream,
        status: int,
        headers: Mapping[str, str],
        pieces: AsyncIterator[bytes],
        tried: Sequence[str],
    ) -> Reply:
        """Let the picker hear a response, and give the client what the picker lets pass."""
        served = {"envoy.lb": {f"{DESTINATION}-served": tried[-1]}} if self.reports_served else {}
        head = _headers({":status": str(status), **headers})
        await stream.write(
            pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=head), metadata_context=_metadata(served))
        )
        answer = await stream.read()
        added = answer.response_headers.response.header_mutation.set_headers
        got = {**headers, **{added_header.header.key: added_header.header.raw_value.decode() for added_header in added}}
        body = b""
        async for piece in pieces:
            body += await self._passed(stream, piece, is_last=False)
            if self.leaves_at is not None and self.leaves_at in body:
                raise asyncio.CancelledError
        body += await self._passed(stream, b"", is_last=True)
        await stream.end()
        return Reply(status, got, body, list(tried))

    async def _passed(self, stream: _Stream, piece: bytes, *, is_last: bool) -> bytes:
        await stream.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=piece, end_of_stream=is_last)))
        response = (await stream.read()).response_body.response
        if self.response_mode != DUPLEX:
            assert not response.HasField("body_mutation")
            return piece
        streamed = response.body_mutation.streamed_response
        assert streamed.end_of_stream == is_last
        return bytes(streamed.body)

    def first(self, headers: Mapping[str, str], *, is_last: bool) -> pb.ProcessingRequest:
        """The message that begins a stream."""
        modes = pb.ProtocolConfiguration(
            request_body_mode=self.request_mode,  # type: ignore[arg-type]
            response_body_mode=self.response_mode,  # type: ignore[arg-type]
        )
        return pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(headers=_headers(headers), end_of_stream=is_last),
            metadata_context=_metadata(self.metadata),
            protocol_config=modes if self.reports_modes else None,
        )


class _Stream:
    """A stream to the picker, which may refuse at any time."""

    def __init__(self, call: Any) -> None:
        self._call, self._coming = call, None
        self._coming: asyncio.Task[Any] | None

    async def write(self, message: pb.ProcessingRequest) -> None:
        # after a refusal nothing is read; a write that fails for that ends every read that has not begun
        self._next()
        await asyncio.sleep(0)
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self._call.write(message)

    async def read(self) -> Any:
        """The next answer. Raises Refused."""
        answer = await self._next()
        self._coming = None
        assert answer is not grpc.aio.EOF, "the picker left"
        if answer.HasField("immediate_response"):
            now = answer.immediate_response
            headers = {
                set_header.header.key: set_header.header.raw_value.decode() for set_header in now.headers.set_headers
            }
            raise Refused(Reply(now.status.code, headers, now.body))
        return answer

    async def unless_refused(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises Refused."""
        doing, coming = asyncio.ensure_future(work), self._next()
        await asyncio.wait((doing, coming), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        doing.cancel()
        await self.read()
        raise AssertionError("the picker sent an answer without a request")

    async def end(self) -> None:
        """The stream is at its end; the picker has nothing left to send."""
        await self._call.done_writing()
        assert await self._next() is grpc.aio.EOF

    def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()

    def _next(self) -> asyncio.Task[Any]:
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._call.read())
        return self._coming


async def _once(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


def _headers(headers: Mapping[str, str]) -> core.HeaderMap:
    return core.HeaderMap(
        headers=[core.HeaderValue(key=name.lower(), raw_value=value.encode()) for name, value in headers.items()]
    )


def _metadata(metadata: Mapping[str, Mapping[str, Any]]) -> core.Metadata:
    made = core.Metadata()
    for namespace, values in metadata.items():
        made.filter_metadata[namespace].update(values)
    return made

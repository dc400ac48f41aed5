"""The messages that a gateway may send, their order, and the errors for others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import RequestTooLarge
from router.protocols.picker.envoy import base_pb2 as core
from router.protocols.picker.envoy import external_processor_pb2 as pb
from router.protocols.picker.envoy.processing_mode_pb2 import ProcessingMode
from router.protocols.picker.messages import Answer
from router.protocols.picker.phases import MOST_WAITING_PIECES, OutOfOrder, Phases, Pieces
from tests.router.protocols.picker.parts import AUTH, CHAT, a_gateway

Message = pb.ProcessingRequest
POST = {":method": "POST", ":path": CHAT, **AUTH}


def headers(**fields: Any) -> Message:
    return Message(request_headers=pb.HttpHeaders(headers=core.HeaderMap(), **fields))


def body(data: bytes = b"", *, last: bool = False) -> Message:
    return Message(request_body=pb.HttpBody(body=data, end_of_stream=last))


def response(status: bytes = b"200", **fields: Any) -> Message:
    header_map = core.HeaderMap(headers=[core.HeaderValue(key=":status", raw_value=status)])
    return Message(response_headers=pb.HttpHeaders(headers=header_map, **fields))


def piece(data: bytes = b"", *, last: bool = False) -> Message:
    return Message(response_body=pb.HttpBody(body=data, end_of_stream=last))


def trailers(of: str) -> Message:
    return Message(**{f"{of}_trailers": pb.HttpTrailers()})  # type: ignore[arg-type]


class Heard:
    """Phases, and what they answered."""

    def __init__(self, most_bytes: int = 1000) -> None:
        self.answers: list[str | None] = []
        self.early = 0
        self.phases = Phases(self._say, most_bytes=most_bytes, on_early=self._on_early)

    async def take(self, *messages: Message) -> None:
        for message in messages:
            await self.phases.take(message)

    async def _say(self, answer: Answer) -> None:
        self.answers.append(answer.WhichOneof("response"))

    def _on_early(self) -> None:
        self.early += 1


@given(st.lists(st.binary(max_size=20), max_size=9), st.booleans())
def test_a_body_in_any_pieces_is_the_same_body(pieces: list[bytes], ends_with_trailers: bool) -> None:
    async def scene() -> None:
        heard = Heard()
        last = trailers("request") if ends_with_trailers else body(last=True)
        await heard.take(headers(), *map(body, pieces), last)
        assert await heard.phases.body == b"".join(pieces)
        assert heard.answers == []

    asyncio.run(scene())


async def test_a_body_over_the_limit_is_not_kept() -> None:
    heard = Heard(most_bytes=10)
    await heard.take(headers(), body(b"x" * 10), body(b"y" * 10), body(b"z", last=True))
    with pytest.raises(RequestTooLarge):
        await heard.phases.body


async def test_an_answer_flows_before_it_is_read() -> None:
    heard = Heard()
    await heard.take(headers(end_of_stream=True))
    heard.phases.is_sent = True
    heard.phases.names = {"10.0.0.1:80": "b0"}
    await heard.take(response(), piece(b"a"), piece(b"b", last=True))
    assert heard.answers == ["response_headers", "response_body", "response_body"]
    assert (heard.early, heard.phases.adds) == (0, {"x-pointsman-backend": "b0"})
    assert [await heard.phases.pieces.get() for _ in range(3)] == [b"a", b"b", None]


@pytest.mark.parametrize("ending", [[response(end_of_stream=True)], [response(), piece(last=True)]])
async def test_an_answer_ends_with_its_head_or_its_body(ending: list[Message]) -> None:
    heard = Heard()
    await heard.take(headers(end_of_stream=True), *ending)
    assert heard.phases.pieces.is_ended
    assert heard.early == 1


async def test_an_answer_ends_with_its_trailers() -> None:
    heard = Heard()
    await heard.take(headers(end_of_stream=True), response(), piece(b"a"), trailers("response"))
    assert heard.phases.pieces.is_ended
    assert heard.answers[-1] == "response_trailers"


OUT_OF_ORDER: list[tuple[Sequence[Message], str]] = [
    ([body()], "request_body came before request_headers"),
    ([headers(), headers()], "request_headers came after request_headers"),
    ([headers(end_of_stream=True), body()], "request_body came after the headers that ended the request"),
    ([headers(), body(last=True), body()], "request_body came after the body"),
    ([headers(), piece()], "response_body came before response_headers"),
    ([headers(), trailers("response")], "response_trailers came before response_headers"),
    ([headers(), response(), response()], "response_headers came twice"),
    ([headers(), response(), piece(last=True), piece()], "response_body came after the end"),
    ([Message()], "has no known part"),
    ([Message(request_headers=pb.HttpHeaders(), observability_mode=True)], "observability_mode"),
]


@pytest.mark.parametrize(("messages", "message"), OUT_OF_ORDER, ids=[message for _, message in OUT_OF_ORDER])
async def test_messages_out_of_order_are_refused(messages: Sequence[Message], message: str) -> None:
    heard = Heard()
    with pytest.raises(OutOfOrder, match=message):
        await heard.take(*messages)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"request_body_mode": ProcessingMode.STREAMED}, "request_body_mode must be"),
        ({"request_body_mode": ProcessingMode.NONE}, "request_body_mode must be"),
        ({"request_body_mode": ProcessingMode.BUFFERED}, "response_body_mode must be"),
    ],
)
async def test_a_mode_in_which_nothing_can_be_picked_or_counted_is_refused(modes: Any, message: str) -> None:
    first = headers()
    first.protocol_config.CopyFrom(pb.ProtocolConfiguration(**modes))
    with pytest.raises(OutOfOrder, match=message):
        await Heard().take(first)


@pytest.mark.parametrize("wrong", [b"\xff\xff\xff", headers().SerializeToString()], ids=["no message", "no order"])
async def test_a_gateway_with_messages_out_of_order_gets_the_reason_and_nothing_stays(wrong: bytes) -> None:
    async with a_gateway() as (envoy, router), grpc.aio.insecure_channel(envoy.picker) as channel:
        stream: Any = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
        await stream.write(envoy.first(POST, is_last=False).SerializeToString())
        await stream.write(wrong)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert await router.gateway.doors.emptied(5)
        assert router.gateway.admission.is_idle()


async def test_unknown_fields_are_passed_over() -> None:
    heard = Heard()
    # field 99, a text: what a later version may add
    raw = headers(end_of_stream=True).SerializeToString() + b"\x9a\x06\x03new"
    message = Message()
    message.ParseFromString(raw)
    await heard.take(message)
    assert heard.phases.body.result() == b""


async def test_the_writer_waits_for_the_reader_and_never_after_it_left() -> None:
    pieces = Pieces()
    for _ in range(MOST_WAITING_PIECES):
        await pieces.put(b"x")
    one_more = asyncio.create_task(pieces.put(b"y"))
    await asyncio.sleep(0)
    assert not one_more.done()
    pieces.leave()
    await one_more
    for _ in range(2 * MOST_WAITING_PIECES):
        await pieces.put(b"z")
    pieces.end()


async def test_the_end_comes_behind_waiting_pieces_and_delays_no_writer() -> None:
    pieces = Pieces()
    for _ in range(MOST_WAITING_PIECES):
        await pieces.put(b"x")
    # the task that brought it may end the next moment
    pieces.end()
    assert [await pieces.get() for _ in range(MOST_WAITING_PIECES + 1)] == [*[b"x"] * MOST_WAITING_PIECES, None]


async def test_a_reader_that_waits_for_a_piece_gets_the_end() -> None:
    pieces = Pieces()
    waiting = asyncio.create_task(pieces.get())
    await asyncio.sleep(0)
    pieces.end()
    assert await waiting is None


@pytest.mark.parametrize("kind", ["request_headers", "response_headers"])
async def test_too_many_headers_are_out_of_order(kind: str) -> None:
    many = core.HeaderMap(headers=[core.HeaderValue(key="a", raw_value=b"b")] * 10_001)
    phases = Phases(no_answer, most_bytes=100, on_early=lambda: None)
    if kind == "response_headers":
        await phases.take(headers(end_of_stream=True))
    with pytest.raises(OutOfOrder, match="more than 10000 headers"):
        await phases.take(Message(**{kind: pb.HttpHeaders(headers=many)}))


async def no_answer(_: Answer) -> None:
    pass

"""Every reader of bytes that other programs send, fed in pieces; and what its patterns are made of."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.detokenize import StopCutter
from backends.events import sglang, tensorrt_llm, vllm
from backends.events.nouns import MalformedEvents
from backends.fastchat.answer import FastChatAnswer
from backends.http.frames import FrameDecoder
from backends.http.generate_answer import GenerateAnswer
from backends.http.json_members import maybe_twice, with_members
from backends.http.prometheus_text import Metrics
from backends.http.sse import SseDecoder
from backends.messages.answer import AnthropicAnswer
from backends.messages.passed import PassedMessage
from backends.nesting import check_msgpack, decode_json
from backends.ollama.answer import OllamaAnswer
from backends.openai.answer import Ear, OpenAIAnswer, PassedStream
from backends.tgi.answer import TGIAnswer
from http1.client import HttpClient, ServerConnection
from http1.coding import BadCoding, Decoder
from http1.errors import BodyTooLarge, HttpError
from http1.limits import ServerLimits
from http1.request import Request, Requests
from policies.errors import ExpectedError
from policies.nouns import Request as Asked
from router.batches.api.upload import FormReader
from router.batches.requests import requests_in
from router.call.bodies import cost_in_turns
from router.identity.signing_keys import read_keys
from router.protocols.openai.documents import lifted
from router.text.channels import ChannelReader
from router.text.thoughts import ThoughtReader
from router.text.tool_calls import reader_of
from router.text.tool_formats import DEEPSEEK_3, GLM_45, HERMES, LLAMA, MISTRAL_11, ToolFormat, ToolSyntax
from tests.http1.parts import no_connection

Run = Callable[[Iterable[bytes]], None]

READ_BYTES = 256 << 10
"""What the event loop reads at once, at most."""

POURED_BYTES = 32 << 10
"""What a connection to a backend gives to the reader of an answer at once (`http1/message.py`)."""


@dataclass(frozen=True)
class Reader:
    """A reader: `run` makes a new one and gives it all pieces, and returns when that refuses them.

    A pattern begins with one of `beginnings` and repeats some of `parts`, which are what its syntax is made of.
    """

    run: Run
    beginnings: tuple[bytes, ...]
    parts: tuple[bytes, ...]
    at_once: int = READ_BYTES
    """The longest piece that it is given."""
    holds: bool = False
    """It is known to hold the event loop for longer than it should (docs/security.md)."""
    on_thread: bool = False
    """It does not hold the event loop."""
    encode: Callable[[bytes], bytes] | None = None
    """Applied to the pattern as a whole, which then comes in pieces of 1,000 bytes."""


EXPECTED = (ExpectedError, HttpError, BadCoding, BodyTooLarge, MalformedEvents, msgspec.DecodeError, UnicodeDecodeError)
"""What a reader raises for bytes that it refuses."""


def requests(pieces: Iterable[bytes]) -> None:
    """A client's connection; all requests are handled, and all bodies read, before more comes."""
    reader = Requests(ServerLimits(), no_connection())
    for piece in pieces:
        reader.feed(piece)
        while reader.waiting:
            first = reader.waiting.popleft()
            if isinstance(first, Request):
                first.arrived(1 << 30)
        if (incoming := reader.incoming) is not None and incoming._pieces:
            incoming._taken()
        if reader.is_deaf:
            return


class _Transport(asyncio.Transport):
    """A connection whose other end reads everything."""

    is_aborted = False

    def write(self, data: object) -> None:
        """Goes nowhere."""

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.is_aborted

    def abort(self) -> None:
        """Close it."""
        self.is_aborted = True

    close = abort

    def pause_reading(self) -> None:
        """What comes is read at once."""

    resume_reading = pause_reading


def answers(pieces: Iterable[bytes]) -> None:
    """A server's connection, its body read as it comes."""
    loop = asyncio.new_event_loop()
    try:
        connection, transport = ServerConnection(HttpClient("http://a"), loop), _Transport()
        connection.connection_made(transport)
        asked = connection.ask("GET", b"GET / HTTP/1.1\r\n\r\n", None, 1e9)
        answer = connection._answer
        assert answer is not None
        for piece in pieces:
            connection.data_received(piece)
            if answer._pieces:
                answer._taken()
            if transport.is_aborted or answer.is_ended:
                break
        if asked.done():
            asked.exception()
        else:
            asked.cancel()
        connection.connection_lost(None)
    finally:
        loop.close()


def form(pieces: Iterable[bytes]) -> None:
    """A form that is uploaded."""
    reader = FormReader(b"xx", 64 << 20)
    for piece in pieces:
        reader.feed(piece)
        reader.taken()


def coded(coding: str) -> Run:
    """A compressed body: the pieces as they are."""

    def run(pieces: Iterable[bytes]) -> None:
        decoder = Decoder(coding, 64 << 20)
        for piece in pieces:
            decoder.feed(piece)

    return run


def fed(make: Callable[[], Any]) -> Run:
    """Something with `feed`, the results of which are used up."""

    def run(pieces: Iterable[bytes]) -> None:
        reader = make()
        for piece in pieces:
            for _ in reader.feed(piece):
                pass
            if getattr(reader, "is_over", False):
                return
        if hasattr(reader, "end"):
            for _ in reader.end():
                pass

    return run


def whole(read: Callable[[bytes], object]) -> Run:
    """A function of all bytes at once."""

    def run(pieces: Iterable[bytes]) -> None:
        read(b"".join(pieces))

    return run


def text(make: Callable[[], Any]) -> Run:
    """A reader of an answer's text."""

    def run(pieces: Iterable[bytes]) -> None:
        reader = make()
        for piece in pieces:
            reader.push(piece.decode(errors="replace"))
        if not isinstance(reader, StopCutter):
            reader.push("", is_last=True)

    return run


def calls_of(tool_format: ToolFormat) -> Run:
    """The calls in an answer's text."""
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "object"}}}
    syntax = ToolSyntax(tool_format, frozenset({"f"}), {"f": schema})
    return text(lambda: reader_of(syntax, str))


def json_body(body: bytes) -> None:
    """The body of a request: its cost, its members, its values."""
    for _ in cost_in_turns(body):
        pass
    maybe_twice(body, ("model", "stream"))
    if isinstance(decode_json(body), dict):
        with_members(body, {"model": "m"})


def stream(make: Callable[[], Any], beginnings: tuple[bytes, ...], parts: tuple[bytes, ...]) -> Reader:
    """The reader of a backend's stream."""
    return Reader(fed(make), beginnings, parts, at_once=POURED_BYTES)


def documents(body: bytes) -> None:
    """Documents between marks in a message."""
    lifted({"messages": [{"role": "user", "content": body.decode(errors="replace")}]})


def message_batch(body: bytes) -> None:
    """Anthropic's batch."""
    for _ in requests_in(io.BytesIO(body), most_bytes=8 << 20):
        pass


def metrics(page: bytes) -> None:
    """A page of metrics."""
    found = Metrics(page, ("m", "vllm:num_requests_running"))
    found.total("m")
    found.labels("m")


def keys(document: bytes) -> None:
    """An issuer's keys."""
    try:
        read_keys(document)
    except ValueError:
        return


def msgpack(payload: bytes) -> None:
    """Events of a cache."""
    check_msgpack(payload)
    for decode in (vllm.decode, sglang.decode):
        with suppress(MalformedEvents):
            decode(payload)


def asked() -> Asked:
    """A usual request."""
    return Asked("r", "t", "m", "d", 5, 16, "c")


DATA = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
JSON = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"\\",
    b"\\u0000",
    b"\\\\",
    b"1",
    b" ",
    b"null",
    b'"a":',
    b'{"a":1}',
    b"e",
    b"-",
    b'""',
)
LINES = (b"\r", b"\n", b"\r\n", b":", b"data:", b"data: ", b"event:", b"a", b"\xef\xbb\xbf", b"data\n", b" ", b"\0")
HTTP = (
    b"\r\n",
    b"\n",
    b"\r",
    b":",
    b" ",
    b"a",
    b"0",
    b"1",
    b";",
    b",",
    b"\t",
    b"\0",
    b"0\r\n\r\n",
    b"1\r\nx\r\n",
    b"X:\r\n",
    b"10\r\n",
)
MARKS = (
    *(b"<tool_call>", b"</tool_call>", b"<arg_key>", b"</arg_key>", b"<arg_value>", b"</arg_value>", b"<|python_tag|>"),
    *(
        b"[TOOL_CALLS]",
        b"[ARGS]",
        b"f",
        b"<",
        b" ",
        b"\n",
        b"{",
        b"}",
        b'"',
        b"\\",
        b'{"name":',
        b'"f"',
        b'"arguments":',
        b"[",
        b";",
    ),
    *(
        b"<|channel|>",
        b"<|message|>",
        b"<|end|>",
        b"<|start|>",
        b"assistant",
        b"to=functions.f",
        b"</think>",
        b"<think>",
        b",",
    ),
    *(
        "<｜tool▁call▁begin｜>".encode(),
        "<｜tool▁sep｜>".encode(),
        "<｜tool▁call▁end｜>".encode(),
        b"```json\n",
        b"ab",
        b"aba",
    ),
)
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"

READERS: Mapping[str, Reader] = {
    "HTTP requests": Reader(
        requests,
        (
            b"",
            b"GET /",
            HEAD,
            HEAD + b"X: ",
            HEAD + CHUNKED,
            HEAD + CHUNKED + b"fffffff\r\n",
            HEAD + CHUNKED + b"0\r\n",
            HEAD + b"Content-Length: 60000000\r\n\r\n",
            HEAD + CHUNKED + b"1;",
        ),
        (*HTTP, HEAD + b"\r\n", HEAD + CHUNKED + b"0\r\n\r\n", HEAD + b"Content-Length: 1\r\n\r\nx"),
    ),
    "HTTP answers": Reader(
        answers,
        (
            b"",
            OK,
            OK + b"X: ",
            OK + CHUNKED,
            OK + CHUNKED + b"fffffff\r\n",
            OK + CHUNKED + b"0\r\n",
            OK + b"\r\n",
            OK + CHUNKED + b"1;",
        ),
        (*HTTP, b"HTTP/1.1 100 Continue\r\n\r\n"),
    ),
    "multipart forms": Reader(
        form,
        (
            b"",
            b"--xx\r\n",
            b"--xx\r\nContent-Disposition: form-data; name=a\r\n\r\n",
            b"--xx\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n",
            b"--xx\r\nContent-Disposition: ",
        ),
        (
            b"\r",
            b"\n",
            b"\r\n",
            b"-",
            b"--",
            b"--x",
            b"\r\n--x",
            b"--xx\r\n",
            b"\r\n--xx",
            b"\r\n--xx\r\n\r\n",
            b"a",
            b":",
            b";",
            b'"',
            b"a: b\r\n",
            b"name=a;",
            b"\\",
            b"=",
            b" ",
            b'name="',
            b"*0=",
        ),
        at_once=64 << 10,
    ),
    "gzip": Reader(
        coded("gzip"),
        (b"", b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"\x1f\x8b\x08\x1f"),
        (b"\0", b"\xff", b"\0\0\0\xff\xff", b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x03\0\0\0\0\0\0\0\0\0", b"a", b"\x01"),
    ),
    "deflate": Reader(
        coded("deflate"), (b"", b"x\x9c"), (b"\0", b"\xff", b"\0\0\0\xff\xff", b"\x03\0", b"a", b"\x01", b"\x9c")
    ),
    "deflate that grows": Reader(coded("deflate"), (b"",), (b"\0", b"a", b"ab", b"\r\n"), encode=zlib.compress),
    "SSE": stream(SseDecoder, (b"", b"data: ", b"event: a\ndata: b"), LINES),
    "JSON lines": stream(FrameDecoder, (b"", b"{"), (b"\n", b"\r\n", b" ", b"a", b"\0", b"{}\n")),
    "OpenAI's stream, passed": stream(
        lambda: PassedStream(Ear("b", 5), shows_usage=False),
        (b"", DATA, b"data: {", b'data: {"choices":['),
        (*LINES, *JSON, DATA),
    ),
    "OpenAI's stream, read": stream(
        lambda: OpenAIAnswer("b", asked(), is_streamed=True), (b"", DATA, b"data: {"), (*LINES, *JSON, DATA)
    ),
    "OpenAI's answer, whole": Reader(
        fed(lambda: OpenAIAnswer("b", asked(), is_streamed=False)), (b"", b"{", b'{"choices":['), JSON, holds=True
    ),
    "Anthropic's stream, passed": stream(
        lambda: PassedMessage("b"), (b"", b'data: {"type":"ping"'), (*LINES, *JSON, b'data: {"type":"ping"}\n\n')
    ),
    "Anthropic's stream, read": stream(
        lambda: AnthropicAnswer("b"), (b"", b'data: {"type":"ping"'), (*LINES, *JSON, b'data: {"type":"ping"}\n\n')
    ),
    "Ollama's stream": stream(
        lambda: OllamaAnswer("b"),
        (b"", b"{"),
        (
            *JSON,
            b"\n",
            b'{"message":{"content":"a"}}\n',
            b'{"message":{"tool_calls":[{"function":{"name":"f","arguments":{}}}]}}\n',
        ),
    ),
    "TGI's stream": stream(
        lambda: TGIAnswer("b", stops=("aab",)),
        (b"",),
        (*LINES, *JSON, b'data: {"token":{"id":1,"text":"aa","logprob":0,"special":false}}\n\n'),
    ),
    "SGLang's stream": stream(
        lambda: GenerateAnswer("b", is_cumulative=True),
        (b"",),
        (*LINES, *JSON, b'data: {"text":"a","meta_info":{"id":"a"},"output_ids":[1]}\n\n'),
    ),
    "FastChat's stream": stream(
        lambda: FastChatAnswer("b"), (b"", b"{"), (*JSON, b"\0", b'{"text":"a","error_code":0}\0')
    ),
    "JSON bodies": Reader(
        whole(json_body), (b"", b"{", b'{"a":"', b'{"a":[', b'{"a":{', b'{"model":"a","a":"'), JSON, on_thread=True
    ),
    "documents in messages": Reader(
        whole(documents),
        (b"", b"{{documents any}}\n"),
        (
            b"{{documents any}}",
            b"{{documents fixed}}\n",
            b"{{/documents}}",
            b"{{document a: b}}\n",
            b"{",
            b"}",
            b"\n",
            b"a",
            b"{{document ",
            b": ",
        ),
        on_thread=True,
    ),
    "message batches": Reader(
        whole(message_batch),
        (b"", b"{", b'{"requests":[', b'{"requests":["'),
        (*JSON, b"[],", b'{"custom_id":"a"},'),
        on_thread=True,
    ),
    "metrics": Reader(
        whole(metrics),
        (b"", b"m", b"m{", b'm{a="'),
        (b"\n", b"m", b" ", b"1", b"{", b"}", b'"', b"\\", b",", b"=", b'a="b",', b'm{a="b"} 1\n', b"m 1\n", b"#"),
    ),
    "keys of issuers": Reader(
        whole(keys),
        (b"", b'{"keys":['),
        (*JSON, b'{"kty":"RSA","n":"AQAB","e":"AQAB"},', b'{"kty":"OKP","crv":"Ed25519","x":"AA"},'),
    ),
    "cache events, MessagePack": Reader(
        whole(msgpack),
        (b"", b"\x93\xcb\0\0\0\0\0\0\0\0\xdd\0\1\0\0", b"\xdd\xff\xff\xff\xff", b"\x81", b"\xdf\xff\xff\xff\xff"),
        (
            b"\x90",
            b"\x91",
            b"\x80",
            b"\x81",
            b"\xc0",
            b"\xa1a",
            b"\xdd\0\0\0\1",
            b"\xc4\0",
            b"\xd9\0",
            b"\0",
            b"\xff",
            b"\xc1",
            b"\x92\xb0AllBlocksCleared\xc0",
            b"\x91\xb0AllBlocksCleared",
            b"\xcf\0\0\0\0\0\0\0\1",
        ),
    ),
    "cache events, JSON": Reader(
        whole(tensorrt_llm.decode), (b"", b"["), (*JSON, b'{"event_id":1,"data":{"type":"created"}},')
    ),
    "calls, Hermes": Reader(
        calls_of(HERMES),
        (b"", b"<tool_call>", b'<tool_call>{"name": "', b'<tool_call>{"name":"f","arguments":{'),
        MARKS,
    ),
    "calls, Llama": Reader(calls_of(LLAMA), (b"", b"{", b'{"name":"f","parameters":{'), MARKS),
    "calls, Mistral": Reader(calls_of(MISTRAL_11), (b"", b"[TOOL_CALLS]", b"[TOOL_CALLS]f[ARGS]{"), MARKS),
    "calls, DeepSeek": Reader(calls_of(DEEPSEEK_3), (b"", "<｜tool▁calls▁begin｜>".encode()), MARKS),
    "calls, GLM": Reader(
        calls_of(GLM_45),
        (
            b"",
            b"<tool_call>f\n",
            b"<tool_call>f\n<arg_key>a</arg_key><arg_value>",
            b"<tool_call>f\n<arg_key>b</arg_key><arg_value>",
        ),
        MARKS,
    ),
    "channels": Reader(
        text(lambda: ChannelReader(str)),
        (b"", b"<|channel|>analysis<|message|>", b"<|channel|>commentary to=functions.f<|message|>"),
        MARKS,
    ),
    "reasoning": Reader(text(lambda: ThoughtReader(is_open=False)), (b"", b"<think>", b"<think>a"), MARKS),
    "stop strings": Reader(
        text(lambda: StopCutter(("aab" * 10, "ab" * 499 + "c", "a" * 999 + "b"))),
        (b"",),
        (b"a", b"ab", b"aab", b"b", b" "),
    ),
}

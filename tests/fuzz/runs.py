"""How each reader of bytes that other programs send is fed in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, mkdtemp
from typing import Any

import msgspec

from backends.detokenize import StopCutter
from backends.events.nouns import MalformedEvents
from backends.http.exchange import WholeBody
from backends.http.json_members import maybe_twice, with_members
from backends.llama_cpp.backend import load_of_slots
from backends.nesting import decode_json, has_many_values
from backends.openai.endpoints import endpoints_in
from backends.sglang import loads_of
from backends.shard.defaults import defaults_in
from backends.tensorrt_llm import load_of
from http1.client import HttpClient, ServerConnection
from http1.coding import BadCoding, Decoder
from http1.errors import BodyTooLarge, HttpError
from http1.limits import ServerLimits
from http1.request import Request, Requests
from policies.errors import ConfigError, ExpectedError, InvalidRequest
from policies.nouns import Request as Asked
from policies.sla.parse import examine
from policies.sla.secrets import Outside
from router.batches.api.upload import FormReader
from router.batches.lines import lines_of, read_line
from router.batches.one_line import one_line
from router.call.bodies import cost_in_turns
from router.fleet.discovery.kubernetes import _places
from router.identity.tokens import _parts, is_token
from router.protocols.grpc.messages import ask_of, read_message
from router.protocols.grpc.v1.inference_pb2 import GenerateRequest
from router.shared.keys.lines import decode as keys_of_file
from router.text.tool_calls import reader_of
from router.text.tool_formats import ToolFormat, ToolSyntax
from shards.kv.peer_wire import PeerRefused, next_request, take
from shards.kv.raw_block import BrokenBlock
from shards.lora.checkpoint import _config, _header
from shards.network.config_file import read_config
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.parallel.link import PartLink
from shards.parallel.orders import Orders
from tests.fuzz.syntax import MARKS
from tests.http1.parts import no_connection
from tls.der import pin_of

msgpack_of_orders = msgspec.msgpack.Decoder(Orders).decode

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
    frames: tuple[tuple[bytes, bytes], ...] = ()
    """Beginnings with the ends that make a whole of parts between them."""
    most_bytes: int = 16 << 20
    """What its caller gives it at most."""
    on_thread: bool = False
    """It runs beside the event loop, and holds it for as long as one call into C keeps the interpreter."""
    at_start: bool = False
    """It has run before anything else does."""
    most_whole: int = 16 << 20
    """How long a whole of `frames` gets; then another begins."""
    is_whole: bool = False
    """It is given all bytes at once, in one piece."""
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


def whole(
    read: Callable[[bytes], object],
    beginnings: tuple[bytes, ...],
    parts: tuple[bytes, ...],
    frames: tuple[tuple[bytes, bytes], ...] = (),
    most_bytes: int = 16 << 20,
    *,
    on_thread: bool = False,
    at_start: bool = False,
) -> Reader:
    """The reader that is a function of all bytes at once."""

    def run(pieces: Iterable[bytes]) -> None:
        read(b"".join(pieces))

    return Reader(
        run,
        beginnings,
        parts,
        most_bytes,
        frames=frames,
        most_bytes=most_bytes,
        on_thread=on_thread,
        at_start=at_start,
        is_whole=True,
    )


def text(make: Callable[[], Any], beginnings: tuple[bytes, ...], parts: tuple[bytes, ...]) -> Reader:
    """The reader of an answer's text, which gets no more of it at once than its stream does."""

    def run(pieces: Iterable[bytes]) -> None:
        reader = make()
        for piece in pieces:
            reader.push(piece.decode(errors="replace"))
        if not isinstance(reader, StopCutter):
            reader.push("", is_last=True)

    return Reader(run, beginnings, parts, at_once=POURED_BYTES)


def calls_of(tool_format: ToolFormat, beginnings: tuple[bytes, ...]) -> Reader:
    """The reader of the calls in an answer's text."""
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "object"}}}
    syntax = ToolSyntax(tool_format, frozenset({"f"}), {"f": schema})
    return text(lambda: reader_of(syntax, str), beginnings, MARKS)


def json_body(body: bytes) -> None:
    """The body of a request: its cost, its members, its values."""
    for _ in cost_in_turns(body):
        pass
    maybe_twice(body, ("model", "stream"))
    if isinstance(decode_json(body), dict):
        with_members(body, {"model": "m"})


def stream(
    make: Callable[[], Any],
    beginnings: tuple[bytes, ...],
    parts: tuple[bytes, ...],
    frames: tuple[tuple[bytes, bytes], ...] = (),
) -> Reader:
    """The reader of a backend's stream."""
    return Reader(fed(make), beginnings, parts, at_once=POURED_BYTES, frames=frames, most_whole=4_000_000)


def answer(make: Callable[[], WholeBody]) -> Callable[[bytes], None]:
    """Reads an answer in one piece. What a thread reads is given back in turns, and holds nobody up."""

    def read(body: bytes) -> None:
        if not has_many_values(body):
            make().read(body)

    return read


def keys_in_lines(body: bytes) -> None:
    """The file of issued keys."""
    keys_of_file(body, "keys")


def sla(body: bytes) -> None:
    """An SLA file."""
    with suppress(ConfigError):
        examine(body.decode(), source="sla.yaml", outside=Outside({}))


def batch_lines(body: bytes) -> None:
    """The file of a job."""
    file = Path(mkdtemp()) / "lines"
    try:
        file.write_bytes(body)
        for _, raw in lines_of(file, most_bytes=8 << 20):
            with suppress(*EXPECTED):
                read_line(raw)
            with suppress(ValueError):
                one_line(raw)
    finally:
        rmtree(file.parent)


def lora(body: bytes) -> None:
    """The header of an adapter's file, and its configuration."""
    with NamedTemporaryFile() as file:
        for raw, read in ((len(body).to_bytes(8, "little") + body, _header), (body, _config)):
            file.seek(0)
            file.write(raw)
            file.flush()
            with suppress(BrokenCheckpoint, UnsupportedCheckpoint):
                read(Path(file.name))


def checkpoint(body: bytes) -> None:
    """A model's config.json."""
    folder = Path(mkdtemp())
    try:
        (folder / "config.json").write_bytes(body)
        with suppress(BrokenCheckpoint, UnsupportedCheckpoint):
            read_config(folder)
    finally:
        rmtree(folder)


def token(body: bytes) -> None:
    """A signed token, as far as it is read before its signature is checked."""
    text = body.decode("latin-1")
    if is_token(text):
        _parts(text)


def pages(page: bytes) -> None:
    """What engines show about themselves."""
    for read in (load_of_slots, load_of, loads_of):
        with suppress(*EXPECTED):
            read(page, 1.0)
    endpoints_in(page)
    defaults_in(page, "b")


def certificate(body: bytes) -> None:
    """A certificate, for the digest of its key."""
    with suppress(ValueError):
        pin_of(body)


def generate(body: bytes) -> None:
    """A gRPC request: its protobuf, and the JSON in it."""
    with suppress(InvalidRequest):
        ask_of(read_message(body, GenerateRequest()), {}, None, {})
    texts = GenerateRequest(model="m", tools_json=body.decode(errors="replace"), prompt="p")
    texts.chat.messages.add(role="user", content="a", tool_calls_json=texts.tools_json)
    with suppress(InvalidRequest):
        ask_of(texts, {}, None, {})


class Given:
    """A connection over which these bytes come."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._rest = iter(pieces), memoryview(b"")

    def recv(self, size: int) -> bytes:
        """See socket."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        taken, self._rest = self._rest[:size], self._rest[size:]
        return bytes(taken)

    def recv_into(self, buffer: memoryview) -> int:
        """See socket."""
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def sendall(self, data: object) -> None:
        """Goes nowhere."""

    def setsockopt(self, *_: object) -> None:
        """It has none."""

    def close(self) -> None:
        """Nothing is open."""


def peer(pieces: Iterable[bytes]) -> None:
    """A shard that asks for blocks, and one that gives them."""
    connection = Given(pieces)
    with suppress(OSError, PeerRefused, BrokenBlock):
        while next_request(connection, bytes(32)) is not None:
            take(connection, [memoryview(bytearray(100))])


def link(pieces: Iterable[bytes]) -> None:
    """The parts of a divided model."""
    parts = PartLink(Given(pieces), waits_s=1)  # type: ignore[arg-type]
    while (message := parts.receive()) is not None:
        with suppress(*EXPECTED):
            msgpack_of_orders(message)


def watch(body: bytes) -> None:
    """A line of Kubernetes' watch; a large one is read on a thread."""
    if not has_many_values(body):
        event = decode_json(body)
        with suppress(KeyError, TypeError, AttributeError):
            list(_places(event, "http"))


def asked() -> Asked:
    """A usual request."""
    return Asked("r", "t", "m", "d", 5, 16, "c")

"""How each reader of files, of what stores hold, and of protobuf messages is fed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from backends.http.own_keys import OwnKeys
from backends.kserve import inference_pb2 as kserve
from backends.protobuf import FEW_BYTES, read_message
from backends.triton.answer import TritonText, heard_of, is_final
from policies.errors import ExpectedError
from policies.nouns import Request
from router.operate.audit.chain import Chain
from router.operate.audit.reader import checked, newest
from router.operate.telemetry.decision_reader import records_of
from router.operate.usage.journal import orphans
from router.protocols.picker.envoy import external_processor_pb2 as envoy
from router.protocols.picker.messages import headers_in, modes_of, served_in, subset_in
from router.shared.documents.redis import notes_in, sets_in, uses_in
from router.shared.replicas.snapshot import Unfit, decode_header, decode_piece
from router.shared.store.debts import _taken
from shards.gguf.folder import _fill
from shards.gguf.header import GgufHeader
from shards.kv.block_files import BlockFiles
from shards.kv.peer_identity import PeerIdentity
from shards.kv.peer_wire import Connection, Offer, OfferedBlock, PeerRefused, greet, offer, welcome
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint

Read = Callable[[bytes], None]

_Message = TypeVar("_Message", bound=Message)


def in_folder(read: Callable[[Path, bytes], None]) -> Read:
    """`read` with a new folder for its bytes."""

    def run(body: bytes) -> None:
        folder = Path(mkdtemp())
        try:
            read(folder, body)
        finally:
            rmtree(folder)

    return run


def written(folder: Path, name: str, body: bytes) -> Path:
    """A private file with `body`."""
    file = folder / name
    file.touch(0o600)
    file.write_bytes(body)
    return file


def field(number: int, content: bytes) -> bytes:
    """A protobuf field with a length."""
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def parsed(of: Callable[[bytes], bytes], body: bytes, message: _Message) -> _Message:
    """The message `of` the body; a large one is read on a thread, as `read_in_turns` does."""

    def read() -> _Message:
        return read_message(of(body), message)

    if len(body) <= FEW_BYTES:
        return read()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(read).result()


HINT = b"envoy.lb.subset_hint", b"x-gateway-destination-endpoint-subset"


def gateway_message(body: bytes) -> None:
    """A gateway's message: as it is, as one with these headers, and as one with these endpoints."""
    for of in (bytes, lambda body: field(2, field(1, body)), with_endpoints):
        with suppress(DecodeError, ValueError):
            message = parsed(of, body, envoy.ProcessingRequest())
            subset_in(message)
            served_in(message)
            modes_of(message)
            headers_in(message.request_headers.headers)


def with_endpoints(body: bytes) -> bytes:
    """A gateway's message that allows these endpoints."""
    endpoints = field(1, HINT[1]) + field(2, field(6, body))
    return field(8, field(1, field(1, HINT[0]) + field(2, field(1, endpoints))))


def inferred(body: bytes) -> None:
    """A response of Triton over gRPC, and one with this as its text."""
    output = field(5, field(1, b"text_output") + field(2, b"BYTES"))
    for of in (bytes, lambda body: field(2, body), lambda body: field(2, output + field(6, body))):
        with suppress(DecodeError):
            response = parsed(of, body, kserve.ModelStreamInferResponse()).infer_response
            with suppress(ExpectedError):
                heard_of("b", TritonText(Request("r", "t", "m", "d", 5, 16, "c"), is_cumulative=False), response)
            is_final(response)


def document_hashes(body: bytes) -> None:
    """Document sets in Redis, what became of them, and their uses."""
    for read in (sets_in, notes_in, uses_in):
        read({body[:100]: body, b"requests:a": body})


def snapshot(body: bytes) -> None:
    """A snapshot of what routers have learned, sealed as its writer does."""
    sealed = zlib.crc32(body).to_bytes(4, "little") + body
    for read in (decode_header, decode_piece):
        with suppress(Unfit):
            read(sealed)


def journal(folder: Path, body: bytes) -> None:
    """The journal of usage that a router has left behind."""
    written(folder, "a.usage", body)
    for orphan in orphans(folder):
        orphan.after(0)
        orphan.release()


def debts(folder: Path, body: bytes) -> None:
    """The debts that a router has left behind."""
    if (left := _taken(written(folder, "a.owed", body), "p")) is not None:
        left.release()


def decisions(folder: Path, body: bytes) -> None:
    """A log of decisions."""
    for _ in records_of(written(folder, "log", body)):
        pass


def audit(folder: Path, body: bytes) -> None:
    """An audit log: checked from its beginning, and its newest records."""
    file = written(folder, "audit.log", body)
    for _ in checked(file, Chain()):
        pass
    newest(file, most=1000)


KEYS = frozenset(f"sk-{number:040x}" for number in range(1000))
OWN_KEYS = OwnKeys({}, "sk-own", lambda: KEYS)


def error_page(body: bytes) -> None:
    """An error of a server, looked through for the keys of the router, of which there are a thousand."""
    OWN_KEYS.hidden_bytes(body)


def gguf(folder: Path, body: bytes) -> None:
    """A model in GGUF: its header, tokenizer and configuration."""
    with suppress(BrokenCheckpoint, UnsupportedCheckpoint):
        _fill(folder, GgufHeader(written(folder, "m.gguf", body)))


def kv_file(folder: Path, body: bytes) -> None:
    """A file in the folder of a shard's KV."""
    files = BlockFiles(folder, bytes(32))
    try:
        written(folder / "0" / bytes(32).hex()[:32], f"{1:016x}.kv", body)
        files.scan()
    finally:
        files.close()


IDENTITY = PeerIdentity(b"k" * 32, bytes(32))


def handshakes(connected: Callable[[Iterable[bytes]], Connection]) -> Callable[[Iterable[bytes]], None]:
    """Both ends of a connection between shards, and the answer to an offer."""
    blocks = [OfferedBlock(-1, 0.0, bytes(64))]

    def run(pieces: Iterable[bytes]) -> None:
        given = list(pieces)
        for end in (greet, welcome):
            with suppress(OSError, PeerRefused):
                end(connected(given), IDENTITY)
        with suppress(OSError, PeerRefused):
            offer(connected(given), Offer("a:1", "d", False, blocks))

    return run

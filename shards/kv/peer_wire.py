"""The bytes that two shards exchange: a handshake, wanted blocks, blocks, and offers of blocks. Torch-free.

A connection begins with a handshake in which both ends prove that they know the same secret (HMAC-SHA-256 over both
nonces), without sending it, and then that their KV has the same fingerprint. The end that connected proves it first: a
stranger that connects gets a nonce, and nothing to try secrets on. Then that end sends requests:

- wanted blocks: the labels of up to MOST_WANTED blocks. The answer is those blocks in order, up to the first that is
  not there;
- an offer of up to MOST_OFFERED blocks, by a shard that is about to stop: their tokens. The other shard fetches the
  blocks that it has room for, over connections of its own. The answer comes afterwards: a byte for each block, 1 if the
  other shard has it.

Bytes are encrypted if the connection has TLS (`shards.kv.peer_identity.PeerTls`), below all of this.
"""

from __future__ import annotations

import hmac
import math
import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.kv.peer_identity import PeerIdentity
from shards.kv.raw_block import BlockLabel, BrokenBlock, checksum_of

MOST_WANTED = 64
"""Blocks of one request."""

MOST_OFFERED = 16_384
"""Blocks of one offer: a million tokens."""

_MAGIC = b"pointsman-peer\x00\x03"
_HELLO = struct.Struct("<16s32s")
_PROOF = struct.Struct("<32s32s")
_WANTS, _OFFERS = b"W", b"O"
_COUNT = struct.Struct("<H")
_WANTED = struct.Struct(f"<32s32sQQI{BLOCK_TOKENS * TOKEN_BYTES}s")
_BLOCK = struct.Struct("<?Q16s")
_OFFER = struct.Struct("<?BHI")
_OFFERED = struct.Struct(f"<id{BLOCK_TOKENS * TOKEN_BYTES}s")
_NONCE_BYTES = 32


class PeerRefused(Exception):
    """The other end is not a shard that may exchange these blocks. The message says why."""


class _OtherKv(PeerRefused):
    """The other end knows the secret, and has another fingerprint."""


class Connection(Protocol):
    """What is needed of a socket."""

    def recv(self, size: int, /) -> bytes: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def sendall(self, data: bytes | memoryview, /) -> None: ...


class OfferedBlock(NamedTuple):
    """A block of `token_ids` behind the block at index `parent` of its offer, which comes before it; -1: behind none.

    It was last used `age` turnovers of its shard's pool ago, as `shards.kv.idle` counts worth.
    """

    parent: int
    age: float
    token_ids: bytes


class Offer(NamedTuple):
    """Blocks of the cache domain `domain` that can be fetched at `address` (host:port; without a host: at the host
    that the offer came from). `may_evict`: they may replace cached blocks that are worth less.
    """

    address: str
    domain: str
    may_evict: bool
    blocks: Sequence[OfferedBlock]


def greet(connection: Connection, identity: PeerIdentity) -> None:
    """Begin a connection to a lender. Raises PeerRefused, OSError."""
    nonce = os.urandom(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(_MAGIC, nonce))
    theirs = _nonce_in(connection)
    connection.sendall(_proof(b"borrower", nonce, theirs, identity.fingerprint, identity.key))
    try:
        _verify(connection, b"lender", nonce, theirs, identity)
    except ConnectionError:
        raise PeerRefused("it closed the connection; does it have the same secret?") from None


def welcome(connection: Connection, identity: PeerIdentity) -> None:
    """Begin a connection of a borrower. Raises PeerRefused, OSError."""
    theirs = _nonce_in(connection)
    nonce = os.urandom(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(_MAGIC, nonce))
    try:
        _verify(connection, b"borrower", theirs, nonce, identity)
    except _OtherKv:
        # it knows the secret, and may learn why
        connection.sendall(_proof(b"lender", theirs, nonce, identity.fingerprint, identity.key))
        raise
    connection.sendall(_proof(b"lender", theirs, nonce, identity.fingerprint, identity.key))


def ask(connection: Connection, labels: Sequence[BlockLabel]) -> None:
    """Ask for the blocks of `labels`, at most MOST_WANTED. Raises OSError."""
    assert 0 < len(labels) <= MOST_WANTED, f"{len(labels)} blocks are wanted"
    wanted = [
        _WANTED.pack(label.domain, label.chain, label.key, label.parent, label.depth, label.token_ids)
        for label in labels
    ]
    connection.sendall(b"".join([_WANTS, _COUNT.pack(len(labels)), *wanted]))


def offer(connection: Connection, offered: Offer) -> list[bool]:
    """Offer blocks, at most MOST_OFFERED, and wait; returns for each whether the other shard has it now.

    Raises OSError.
    """
    assert 0 < len(offered.blocks) <= MOST_OFFERED, f"{len(offered.blocks)} blocks are offered"
    address, domain = offered.address.encode(), offered.domain.encode()
    head = _OFFER.pack(offered.may_evict, len(address), len(domain), len(offered.blocks))
    blocks = [_OFFERED.pack(*block) for block in offered.blocks]
    connection.sendall(b"".join([_OFFERS, head, address, domain, *blocks]))
    return [bool(each) for each in received(connection, len(offered.blocks))]


def next_request(
    connection: Connection, fingerprint: bytes, *, on_begin: Callable[[], None] = lambda: None
) -> Sequence[BlockLabel] | Offer | None:
    """The labels that the other end wants, or its offer; None when it has closed the connection.

    `on_begin` is called when its first byte has come. Raises PeerRefused, OSError.
    """
    kind = connection.recv(1)
    if not kind:
        return None
    on_begin()
    if kind == _WANTS:
        return _wanted(connection, fingerprint)
    if kind == _OFFERS:
        return _offered(connection)
    raise PeerRefused("it sends a request that this shard does not know")


def reply(connection: Connection, has: Sequence[bool]) -> None:
    """Answer an offer: for each of its blocks, whether this shard has it. Raises OSError."""
    connection.sendall(bytes(has))


def give(connection: Connection, pieces: Sequence[memoryview] | None) -> None:
    """Send one block, or that it is not there. Raises OSError."""
    if pieces is None:
        connection.sendall(_BLOCK.pack(False, 0, bytes(16)))
        return
    connection.sendall(_BLOCK.pack(True, sum(map(len, pieces)), checksum_of(pieces)))
    for piece in pieces:
        connection.sendall(piece)


def take(connection: Connection, pieces: Sequence[memoryview]) -> bool:
    """Receive one block into `pieces`; False if the lender does not have it.

    Raises BrokenBlock if the bytes are not those that were sent, OSError. `pieces` have no meaning then.
    """
    is_there, size, checksum = _BLOCK.unpack(received(connection, _BLOCK.size))
    if not is_there:
        return False
    if size != sum(map(len, pieces)):
        raise BrokenBlock(f"a block of {size} bytes came")
    for piece in pieces:
        left = piece
        while left:
            count = connection.recv_into(left)
            if not count:
                raise ConnectionError("the connection was closed within a block")
            left = left[count:]
    if checksum_of(pieces) != checksum:
        raise BrokenBlock("its bytes were changed on the way")
    return True


def received(connection: Connection, size: int) -> bytes:
    """The next `size` bytes. Raises OSError, also if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return bytes(data)


def _wanted(connection: Connection, fingerprint: bytes) -> list[BlockLabel]:
    (count,) = _COUNT.unpack(received(connection, _COUNT.size))
    if not 0 < count <= MOST_WANTED:
        raise PeerRefused(f"it wants {count} blocks at a time")
    data = received(connection, count * _WANTED.size)
    return [BlockLabel(fingerprint, *fields) for fields in _WANTED.iter_unpack(data)]


def _offered(connection: Connection) -> Offer:
    may_evict, address_bytes, domain_bytes, count = _OFFER.unpack(received(connection, _OFFER.size))
    if not 0 < count <= MOST_OFFERED:
        raise PeerRefused(f"it offers {count} blocks at a time")
    try:
        address = received(connection, address_bytes).decode()
        domain = received(connection, domain_bytes).decode()
    except UnicodeDecodeError:
        raise PeerRefused("its offer is not UTF-8") from None
    fields = _OFFERED.iter_unpack(received(connection, count * _OFFERED.size))
    blocks = [OfferedBlock(*each) for each in fields]
    if not all(-1 <= block.parent < at and math.isfinite(block.age) for at, block in enumerate(blocks)):
        raise PeerRefused("its offer has a block before its parent, or no age")
    return Offer(address, domain, may_evict, blocks)


def _nonce_in(connection: Connection) -> bytes:
    """The nonce of the other end's first message."""
    magic, nonce = _HELLO.unpack(received(connection, _HELLO.size))
    if magic != _MAGIC:
        raise PeerRefused("it speaks another protocol, or another version of it")
    return bytes(nonce)


def _verify(connection: Connection, role: bytes, borrower: bytes, lender: bytes, identity: PeerIdentity) -> None:
    """Receive the proof of the other end, which has the `role`; its nonce and ours are `borrower` and `lender`."""
    proof = received(connection, _PROOF.size)
    _, fingerprint = _PROOF.unpack(proof)
    if not hmac.compare_digest(proof, _proof(role, borrower, lender, fingerprint, identity.key)):
        raise PeerRefused("it does not know the secret")
    if fingerprint != identity.fingerprint:
        raise _OtherKv("its KV is of another model, type, layout or machine")


def _proof(role: bytes, borrower: bytes, lender: bytes, fingerprint: bytes, key: bytes) -> bytes:
    """The proof of the end with this `role` and `fingerprint`, and the fingerprint."""
    return _PROOF.pack(hmac.digest(key, role + borrower + lender + fingerprint, "sha256"), fingerprint)

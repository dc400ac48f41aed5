"""The bytes that two shards exchange: a handshake, wanted blocks, and blocks. Torch-free.

A connection begins with a handshake in which both ends prove that they know the same secret (HMAC-SHA-256 over both
nonces), without sending it, and that their KV has the same fingerprint. Then the borrower sends the labels of up to
MOST_WANTED blocks at a time, and the lender answers with those blocks in order, up to the first that it does not have.
Bytes are not encrypted: the port belongs on the network of the shards.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.kv.raw_block import BlockLabel, BrokenBlock, checksum_of

MOST_WANTED = 64
"""Blocks of one request."""

_MAGIC = b"pointsman-peer\x00\x01"
_HELLO = struct.Struct("<16s32s32s")
_COUNT = struct.Struct("<H")
_WANTED = struct.Struct(f"<32s32sQQI{BLOCK_TOKENS * TOKEN_BYTES}s")
_BLOCK = struct.Struct("<?Q16s")
_NONCE_BYTES = _PROOF_BYTES = 32


class PeerRefused(Exception):
    """The other end is not a shard that may exchange these blocks. The message says why."""


class PeerIdentity(NamedTuple):
    """What both ends must have in common."""

    fingerprint: bytes
    secret: bytes


def greet(connection: socket.socket, identity: PeerIdentity) -> None:
    """Begin a connection to a lender. Raises PeerRefused, OSError."""
    nonce = os.urandom(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(_MAGIC, identity.fingerprint, nonce))
    magic, fingerprint, theirs = _HELLO.unpack(received(connection, _HELLO.size))
    _compare(magic, fingerprint, identity)
    if not hmac.compare_digest(received(connection, _PROOF_BYTES), _proof(b"lender", nonce, theirs, identity)):
        raise PeerRefused("it does not know the secret")
    connection.sendall(_proof(b"borrower", nonce, theirs, identity))


def welcome(connection: socket.socket, identity: PeerIdentity) -> None:
    """Begin a connection of a borrower. Raises PeerRefused, OSError."""
    magic, fingerprint, theirs = _HELLO.unpack(received(connection, _HELLO.size))
    nonce = os.urandom(_NONCE_BYTES)
    # so that the other end learns why
    connection.sendall(_HELLO.pack(_MAGIC, identity.fingerprint, nonce))
    _compare(magic, fingerprint, identity)
    connection.sendall(_proof(b"lender", theirs, nonce, identity))
    if not hmac.compare_digest(received(connection, _PROOF_BYTES), _proof(b"borrower", theirs, nonce, identity)):
        raise PeerRefused("it does not know the secret")


def ask(connection: socket.socket, labels: Sequence[BlockLabel]) -> None:
    """Ask for the blocks of `labels`, at most MOST_WANTED. Raises OSError."""
    assert 0 < len(labels) <= MOST_WANTED, f"{len(labels)} blocks are wanted"
    wanted = [
        _WANTED.pack(label.domain, label.chain, label.key, label.parent, label.depth, label.token_ids)
        for label in labels
    ]
    connection.sendall(b"".join([_COUNT.pack(len(labels)), *wanted]))


def asked(connection: socket.socket, fingerprint: bytes) -> list[BlockLabel]:
    """The labels that the other end wants; empty when it has closed the connection. Raises PeerRefused, OSError."""
    head = connection.recv(1)
    if not head:
        return []
    (count,) = _COUNT.unpack(head + received(connection, _COUNT.size - 1))
    if not 0 < count <= MOST_WANTED:
        raise PeerRefused(f"it wants {count} blocks at a time")
    data = received(connection, count * _WANTED.size)
    return [BlockLabel(fingerprint, *fields) for fields in _WANTED.iter_unpack(data)]


def give(connection: socket.socket, pieces: Sequence[memoryview] | None) -> None:
    """Send one block, or that it is not there. Raises OSError."""
    if pieces is None:
        connection.sendall(_BLOCK.pack(False, 0, bytes(16)))
        return
    connection.sendall(_BLOCK.pack(True, sum(map(len, pieces)), checksum_of(pieces)))
    for piece in pieces:
        connection.sendall(piece)


def take(connection: socket.socket, pieces: Sequence[memoryview]) -> bool:
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


def received(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Raises OSError, also if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return bytes(data)


def _compare(magic: bytes, fingerprint: bytes, identity: PeerIdentity) -> None:
    if magic != _MAGIC:
        raise PeerRefused("it speaks another protocol, or another version of it")
    if fingerprint != identity.fingerprint:
        raise PeerRefused("its KV is of another model, type, layout or machine")


def _proof(role: bytes, borrower: bytes, lender: bytes, identity: PeerIdentity) -> bytes:
    return hmac.digest(identity.secret, role + borrower + lender + identity.fingerprint, "sha256")

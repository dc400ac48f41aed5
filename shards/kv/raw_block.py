"""The raw form of a block, in which it leaves a shard's memory: a header that identifies it, and its bytes. Torch-free.

A key leads to a block, but never proves what it is, because xxh3 does not resist an adversary. A label proves it: it
has the block's tokens, and a SHA-256 over fingerprint, cache domain, adapter and all tokens up to the last one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xxhash import xxh3_64_intdigest, xxh3_128

from shards.kv.adapter_domain import adapter_digest, domain_root, tenant_domain
from shards.kv.fingerprint import Layout
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES, block_keys
from shards.kv.prefix import CachedBlock

_MAGIC = b"pointsman-kv\x00\x00\x00\x01"
_HEADER = struct.Struct(f"<16s32s32s32sQQIdQ16s{BLOCK_TOKENS * TOKEN_BYTES}s")
_CHECK = struct.Struct("<Q")

HEADER_BYTES = _HEADER.size + _CHECK.size
"""Size of a header; the block's bytes follow it."""


class BrokenBlock(Exception):
    """These bytes are not a whole and unchanged block."""


class AnotherBlock(Exception):
    """A block was found under the right key, and it is not the one that was asked for."""


@runtime_checkable
class RawMemory(Protocol):
    """Host memory with slots that can be read and written as bytes."""

    @property
    def layout(self) -> Layout:
        """The tensors of a block, in the order of its bytes."""
        ...

    def raw(self, slot: int) -> tuple[memoryview, ...]:
        """The bytes of `slot` itself, writable, one piece for each tensor of the layout."""
        ...


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """The identity of a block: two blocks with equal labels hold the KV of the same tokens behind the same prefix.

    `domain` is the hash of its cache domain. `chain` is the SHA-256 of its adapter's weights and all tokens up to its
    last one; `depth` blocks come before it. `parent` is the key of the block before it, or of its domain's root.
    """

    fingerprint: bytes
    domain: bytes
    chain: bytes
    key: int
    parent: int
    depth: int
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The first part of a block's raw form. `worth` orders eviction; `size` bytes with this `checksum` follow."""

    label: BlockLabel
    worth: float
    size: int
    checksum: bytes

    def pack(self) -> bytes:
        """HEADER_BYTES bytes, with a checksum of their own."""
        label = self.label
        packed = _HEADER.pack(
            _MAGIC,
            label.fingerprint,
            label.domain,
            label.chain,
            label.key,
            label.parent,
            label.depth,
            self.worth,
            self.size,
            self.checksum,
            label.token_ids,
        )
        return packed + _CHECK.pack(xxh3_64_intdigest(packed))

    @classmethod
    def unpack(cls, data: bytes) -> BlockHeader:
        """The header in `data`. Raises BrokenBlock."""
        if len(data) != HEADER_BYTES or not data.startswith(_MAGIC):
            raise BrokenBlock("it does not begin with the header of a block")
        packed = data[: _HEADER.size]
        if _CHECK.unpack_from(data, _HEADER.size)[0] != xxh3_64_intdigest(packed):
            raise BrokenBlock("its header was changed")
        _, fingerprint, domain, chain, key, parent, depth, worth, size, checksum, token_ids = _HEADER.unpack(packed)
        return cls(BlockLabel(fingerprint, domain, chain, key, parent, depth, token_ids), worth, size, checksum)


def checksum_of(pieces: Iterable[memoryview]) -> bytes:
    """The xxh3-128 of `pieces` in order: it finds damage, not forgery."""
    digest = xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def domain_digest(domain: str) -> bytes:
    """The hash that stands for the tenant's cache domain outside a shard, whatever the adapter: 32 bytes."""
    return hashlib.sha256(b"pointsman domain\x00" + tenant_domain(domain).encode()).digest()


class BlockLabels:
    """Makes the labels of blocks of `model` with KV of `fingerprint`."""

    def __init__(self, model: str, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self._model = model

    def __repr__(self) -> str:
        return f"BlockLabels({self._model}, {self.fingerprint.hex()[:16]})"

    def of(self, cached: CachedBlock) -> BlockLabel:
        """The label of `cached`. Each block remembers its chain, so this costs one hash for each new block."""
        path: list[CachedBlock] = []
        block: CachedBlock | None = cached
        while block is not None and not block.chain:
            path.append(block)
            block = block.parent
        domain = domain_digest(cached.domain)
        chain = self._root(domain, cached.domain) if block is None else block.chain
        for new in reversed(path):
            chain = new.chain = _link(chain, new.token_ids)
        parent = domain_root(self._model, cached.domain) if cached.parent is None else cached.parent.key
        return BlockLabel(self.fingerprint, domain, cached.chain, cached.key, parent, cached.depth, cached.token_ids)

    def first(self, token_ids: bytes, *, domain: str) -> BlockLabel:
        """The label of the first block of a prompt in `domain`."""
        digest, root = domain_digest(domain), domain_root(self._model, domain)
        chain = _link(self._root(digest, domain), token_ids)
        return BlockLabel(self.fingerprint, digest, chain, block_keys(token_ids, root)[0], root, 0, token_ids)

    def after(self, label: BlockLabel, token_ids: bytes) -> BlockLabel:
        """The label of the block with `token_ids` behind the block of `label`."""
        chain, key = _link(label.chain, token_ids), block_keys(token_ids, label.key)[0]
        return BlockLabel(self.fingerprint, label.domain, chain, key, label.key, label.depth + 1, token_ids)

    def _root(self, digest: bytes, domain: str) -> bytes:
        return hashlib.sha256(self.fingerprint + digest + adapter_digest(domain).encode()).digest()


def _link(chain: bytes, token_ids: bytes) -> bytes:
    return hashlib.sha256(chain + token_ids).digest()

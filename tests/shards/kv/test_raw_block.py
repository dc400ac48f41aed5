from __future__ import annotations

from dataclasses import replace

import pytest

from shards.kv.keys import block_keys, root_key
from shards.kv.prefix import PrefixCache
from shards.kv.raw_block import HEADER_BYTES, BlockHeader, BlockLabels, BrokenBlock, checksum_of, domain_digest
from tests.shards.kv.blocks_on_disk import FINGERPRINT, LABELS, a_block, a_header, a_label


def test_a_label_has_the_keys_of_its_block_and_of_the_block_before() -> None:
    root = root_key("m", "acme")
    first, second = block_keys(a_block(1) + a_block(2), root)
    label = a_label(1, 2, domain="acme")
    assert (label.parent, label.key, label.depth, label.token_ids) == (first, second, 1, a_block(2))
    assert a_label(1, domain="acme").parent == root


def test_the_label_of_a_cached_block_is_that_of_its_tokens() -> None:
    cache = PrefixCache("m")
    parent = None
    for block, token in enumerate((1, 2, 3)):
        parent = cache.add(block, parent, a_block(token), domain="acme")
    assert parent is not None
    assert LABELS.of(parent) == a_label(1, 2, 3, domain="acme") == LABELS.of(parent)
    assert parent.parent is not None
    assert LABELS.of(parent.parent) == a_label(1, 2, domain="acme")


def test_a_chain_differs_with_any_token_before_with_the_domain_and_with_the_fingerprint() -> None:
    others = BlockLabels("m", bytes(32))
    chains = {
        a_label(1, 2).chain,
        a_label(3, 2).chain,
        a_label(2).chain,
        a_label(1, 2, domain="acme").chain,
        others.after(others.first(a_block(1), domain=""), a_block(2)).chain,
    }
    assert len(chains) == 5


def test_a_domain_is_not_readable() -> None:
    header = a_header(a_label(1, domain="acme-tenant"), b"kv").pack()
    assert b"acme" not in header
    assert domain_digest("acme-tenant") in header


def test_a_header_comes_back_as_it_was() -> None:
    header = a_header(a_label(1, 2), b"kv" * 100, worth=3.5)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert BlockHeader.unpack(packed) == header
    assert header.label.fingerprint == FINGERPRINT


def test_every_changed_byte_of_a_header_is_found() -> None:
    packed = a_header(a_label(1), b"kv").pack()
    for at in range(len(packed)):
        with pytest.raises(BrokenBlock):
            BlockHeader.unpack(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
    for data in (b"", packed[:-1], packed + b"x"):
        with pytest.raises(BrokenBlock, match="begin with the header"):
            BlockHeader.unpack(data)


def test_a_checksum_covers_all_pieces_in_order() -> None:
    assert checksum_of([memoryview(b"ab"), memoryview(b"c")]) == checksum_of([memoryview(b"abc")])
    assert checksum_of([memoryview(b"abc")]) != checksum_of([memoryview(b"acb")])


def test_labels_show_their_fingerprint() -> None:
    assert repr(LABELS) == "BlockLabels(m, 0001020304050607)"
    assert replace(a_label(1), depth=3) != a_label(1)

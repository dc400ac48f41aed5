from __future__ import annotations

import struct

import pytest
from xxhash import xxh3_64_intdigest

from shards.kv.keys import block_keys, root_key


def test_keys_stay_what_they_are() -> None:
    root = root_key("m", "acme")
    assert root == 0x4A99D21EB5E9D5A
    assert block_keys(struct.pack("<140I", *range(140)), root) == (0xAF2754A92C428BE, 0x481AE8498BA8511D)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("of", [bytes, bytearray, memoryview])
def test_a_key_is_the_hash_of_a_block_seeded_with_its_parent(tokens: int, of: type) -> None:
    data = struct.pack(f"<{tokens}I", *range(7, 7 + tokens))
    parent, expected = 5, []
    for block in range(tokens // 64):
        parent = xxh3_64_intdigest(data[256 * block : 256 * block + 256], seed=parent)
        expected.append(parent)
    assert block_keys(of(data), 5) == tuple(expected)

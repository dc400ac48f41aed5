from __future__ import annotations

import struct

import pytest

from shards.kv.keys import BLOCK_TOKENS, block_keys, root_key
from shards.kv.prefix import PrefixCache
from shards.nouns import CacheChange, CacheEvent


def a_block(token: int) -> bytes:
    return struct.pack("<I", token) * BLOCK_TOKENS


class CollidingCache(PrefixCache):
    """As if an adversary had found tokens for every key."""

    def key(self, parent, token_ids, *, domain):
        return 7


def test_a_block_is_found_behind_its_parent_only():
    cache = PrefixCache("m")
    first = cache.add(0, None, a_block(1), domain="a")
    second = cache.add(1, first, a_block(2), domain="a")
    assert cache.find(first, a_block(2), domain="a") is second
    assert cache.find(None, a_block(2), domain="a") is None
    cache.check()


def test_keys_are_those_that_the_router_computes():
    cache = PrefixCache("m")
    first = cache.add(0, None, a_block(1), domain="a")
    second = cache.add(1, first, a_block(2), domain="a")
    assert (first.key, second.key) == block_keys(a_block(1) + a_block(2), root_key("m", "a"))


def test_another_domain_finds_nothing():
    cache = PrefixCache("m")
    cache.add(0, None, a_block(1), domain="a")
    assert cache.find(None, a_block(1), domain="b") is None


@pytest.mark.parametrize(("domain", "tokens"), [("a", 2), ("b", 1)])
def test_an_equal_key_of_other_tokens_or_domains_is_a_miss_and_is_not_cached(domain, tokens):
    cache = CollidingCache("m")
    cache.add(0, None, a_block(1), domain="a")
    assert cache.find(None, a_block(tokens), domain=domain) is None
    assert cache.add(1, None, a_block(tokens), domain=domain) is None


def test_nothing_is_cached_behind_a_parent_that_is_gone():
    cache = PrefixCache("m")
    first = cache.add(0, None, a_block(1), domain="a")
    cache.displace(first)
    assert cache.add(1, first, a_block(2), domain="a") is None


def test_a_path_drops_what_was_evicted_and_adds_what_was_stored():
    cache = PrefixCache("m")
    first = cache.add(0, None, a_block(1), domain="a")
    second = cache.add(1, first, a_block(2), domain="a")
    path = [first, second]
    cache.displace(second)
    newer = cache.add(5, first, a_block(2), domain="a")
    cache.extend_path(path, lambda index: a_block(index + 1), limit=3, domain="a")
    assert path == [first, newer]


def test_events_are_reported_once_in_order_and_a_snapshot_puts_parents_first():
    cache = PrefixCache("m")
    first = cache.add(0, None, a_block(1), domain="a")
    second = cache.add(1, first, a_block(2), domain="a")
    cache.displace(second)
    third = cache.add(1, first, a_block(3), domain="a")
    assert cache.snapshot() == (CacheEvent(CacheChange.STORED, (first.key, third.key)),)
    assert [(event.change, event.keys) for event in cache.drain_events()] == [
        (CacheChange.STORED, (first.key, second.key)),
        (CacheChange.EVICTED, (second.key,)),
        (CacheChange.STORED, (third.key,)),
    ]
    assert not cache.has_events
    cache.clear()
    assert cache.drain_events() == (CacheEvent(CacheChange.CLEARED),)
    assert cache.snapshot() == ()

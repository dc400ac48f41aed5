"""Blocks that a shard offers before it stops: prompts stay whole, and none that share little are tied together."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shards.kv.hand_over import Batch, HandOver, batches_of
from shards.kv.peer_identity import PeerIdentity
from shards.kv.peer_wire import Offer, OfferedBlock, next_request, reply, welcome
from shards.kv.prefix import CachedBlock, PrefixCache

IDENTITY = PeerIdentity(bytes(32), b"a secret")
LIMIT_S = 10.0


class Blocks:
    """Cached blocks by their prompts: one letter for each block."""

    def __init__(self) -> None:
        self._prefix = PrefixCache("m")
        self.worth: dict[CachedBlock, float] = {}

    def hold(self, prompt: str, *, worth: float, domain: str = "") -> None:
        """Cache `prompt`; the blocks that only it has are worth `worth`."""
        parent: CachedBlock | None = None
        for number, letter in enumerate(prompt):
            tokens = letter.encode() * 256
            cached = self._prefix.find(parent, tokens, domain=domain)
            if cached is None:
                cached = self._prefix.add(len(self.worth) + number, parent, tokens, domain=domain)
            assert cached is not None
            self.worth[cached] = max(worth, self.worth.get(cached, worth))
            parent = cached


def texts(batch: Batch) -> list[str]:
    """The prompts of a batch that end in it."""
    path: list[str] = []
    for block in batch.blocks:
        letter = chr(block.token_ids[0])
        path.append(letter if block.parent < 0 else path[block.parent] + letter)
    parents = {block.parent for block in batch.blocks}
    return [text for at, text in enumerate(path) if at not in parents]


def test_the_most_valuable_prompts_come_first_and_age_counts_from_now() -> None:
    blocks = Blocks()
    for number, letter in enumerate("abc"):
        blocks.hold(letter * 200, worth=number)
    batches = batches_of(blocks.worth, now=5.0)
    assert [texts(batch) for batch in batches] == [["c" * 200], ["b" * 200], ["a" * 200]]
    assert [batch.blocks[0].age for batch in batches] == [3.0, 4.0, 5.0]


def test_prompts_that_share_most_are_offered_together_and_nothing_twice() -> None:
    blocks = Blocks()
    document = "d" * 300
    blocks.hold(document + "x", worth=1.0)
    blocks.hold("o" * 300, worth=2.0)
    blocks.hold(document + "y", worth=3.0)
    first, second = batches_of(blocks.worth, now=3.0)
    assert texts(first) == [document + "y", document + "x"]
    assert len(first.blocks) == 302
    assert texts(second) == ["o" * 300]


def test_a_short_common_beginning_ties_nothing_together() -> None:
    blocks = Blocks()
    for letter in "abc":
        blocks.hold("ss" + letter * 200, worth=1.0)
    batches = batches_of(blocks.worth, now=1.0)
    assert sorted(text for batch in batches for text in texts(batch)) == ["ss" + letter * 200 for letter in "abc"]
    assert len(batches) == 3


def test_short_prompts_of_one_domain_are_offered_together() -> None:
    blocks = Blocks()
    for number in range(26):
        blocks.hold(chr(97 + number) * 3, worth=number, domain="ab"[number % 2])
    batches = batches_of(blocks.worth, now=26.0)
    assert sorted((batch.domain, len(batch.blocks)) for batch in batches) == [("a", 39), ("b", 39)]


def test_what_is_left_of_a_batch_keeps_its_parents() -> None:
    blocks = Blocks()
    blocks.hold("abc", worth=1.0)
    blocks.hold("abd", worth=0.0)
    blocks.hold("x", worth=0.0)
    (batch,) = batches_of(blocks.worth, now=1.0)
    has = [chr(block.token_ids[0]) in "abcx" for block in batch.blocks]
    assert texts(batch.without(has)) == ["abd"]
    assert not batch.without([True] * len(batch.blocks)).blocks


@contextmanager
def heir(takes: Callable[[Offer], list[bool]], seen: list[Offer]) -> Iterator[str]:
    """A shard that answers each offer as `takes` does; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    welcome(connection, IDENTITY)
                    while isinstance(offer := next_request(connection, bytes(32)), Offer):
                        seen.append(offer)
                        reply(connection, takes(offer))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def everything(offer: Offer) -> list[bool]:
    return [True] * len(offer.blocks)


def only_by_eviction(offer: Offer) -> list[bool]:
    return [offer.may_evict] * len(offer.blocks)


def some_batches(count: int) -> list[Batch]:
    return [Batch("", [OfferedBlock(-1, 0.0, bytes([number]) * 256)]) for number in range(count)]


def handed_over(batches: list[Batch], *heirs: str, within_s: float = LIMIT_S) -> int:
    over = HandOver(batches, heirs, IDENTITY, "here:1", within_s=within_s)
    over._thread.join(LIMIT_S)
    assert over.is_over
    return over.taken


def test_each_batch_goes_to_one_shard() -> None:
    seen: tuple[list[Offer], list[Offer]] = ([], [])
    with heir(everything, seen[0]) as first, heir(everything, seen[1]) as second:
        assert handed_over(some_batches(40), first, second) == 40
    assert sorted(offer.blocks[0].token_ids[0] for offers in seen for offer in offers) == list(range(40))
    assert {(offer.address, offer.may_evict) for offers in seen for offer in offers} == {("here:1", False)}


def test_free_room_is_filled_before_anything_is_replaced() -> None:
    full: list[Offer] = []
    with heir(only_by_eviction, full) as shard:
        assert handed_over(some_batches(3), shard) == 3
    assert [offer.may_evict for offer in full] == [False, True, True, True]


def test_a_shard_that_cannot_be_reached_gets_nothing_and_the_others_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Offer] = []
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"127.0.0.1:{gone.getsockname()[1]}"
    with heir(everything, seen) as alive:
        assert handed_over(some_batches(10), dead, alive, "no address") == 10
    assert "cannot be handed over to" in caplog.text


def test_without_any_shard_it_is_over_at_once() -> None:
    assert handed_over(some_batches(3)) == 0


def test_it_ends_in_time() -> None:
    silent: list[Offer] = []
    with heir(lambda _: [], silent) as shard:
        assert handed_over(some_batches(3), shard, within_s=0.2) == 0


def test_it_can_be_broken_off() -> None:
    silent: list[Offer] = []
    with heir(lambda _: [], silent) as shard:
        over = HandOver(some_batches(3), [shard], IDENTITY, "here:1", within_s=LIMIT_S)
        while not silent:
            threading.Event().wait(0.001)
        over.close()
        assert over.is_over

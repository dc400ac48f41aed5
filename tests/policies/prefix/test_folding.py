from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Hashable

import pytest
from xxhash import xxh3_64_intdigest

from policies.prefix.folding import BLOCK_BYTES, Change, Changes, Folder

ROOT = 77


def keys_of(data: bytes, parent: int) -> list[int]:
    """The definition of block keys, once more."""
    keys = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = xxh3_64_intdigest(data[start : start + BLOCK_BYTES], seed=parent)
        keys.append(parent)
    return keys


def tokens(count: int, seed: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *(random.Random(seed).randrange(50_000) for _ in range(count)))


def names(data: bytes, size: int) -> list[Hashable]:
    """An engine's names of its blocks of `size` tokens: here, all tokens before their ends."""
    return [hash(data[:end]) for end in range(4 * size, len(data) + 1, 4 * size)]


class Listener:
    """The held blocks, from changes."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[int]] = defaultdict(set)

    def hear(self, changes: Changes) -> None:
        for change in changes.runs:
            if change.stored:
                assert not self.held & set(change.keys), "a block is in one tier"
                self.tiers[change.tier] |= set(change.keys)
            else:
                assert set(change.keys) <= self.tiers[change.tier], "only what was stored is evicted"
                self.tiers[change.tier] -= set(change.keys)

    @property
    def held(self) -> set[int]:
        return set().union(*self.tiers.values())


@pytest.mark.parametrize("size", [1, 16, 24, 32, 48, 64, 100, 256])
def test_blocks_of_any_size_become_ours_when_they_are_whole(size: int) -> None:
    folder, listener = Folder(keys_of), Listener()
    data = tokens(size * (520 // size))
    parts, ours = names(data, size), keys_of(data, ROOT)
    for at, name in enumerate(parts):
        piece = data[4 * size * at : 4 * size * (at + 1)]
        listener.hear(folder.store([name], parent=parts[at - 1] if at else None, token_ids=piece, root=ROOT))
        assert listener.held == set(ours[: (at + 1) * size // 64])
        folder.check()
    for at in reversed(range(len(parts))):
        listener.hear(folder.evict([parts[at]]))
        assert listener.held == set(ours[: at * size // 64])
        folder.check()
    assert repr(folder) == "<Folder of 0 parts, 0 orphans>"


def test_many_blocks_in_one_event_are_one_run() -> None:
    folder, data = Folder(keys_of), tokens(256)
    changes = folder.store(names(data, 16), token_ids=data, root=ROOT)
    assert changes.runs == [Change(True, "device", keys_of(data, ROOT))]
    assert not changes.has_hole


def test_prompts_that_part_inside_one_of_our_blocks_have_two() -> None:
    folder, listener, common = Folder(keys_of), Listener(), tokens(48)
    first, second = common + tokens(16, seed=1), common + tokens(16, seed=2)
    for data in (first, second):
        listener.hear(folder.store(names(data, 16), token_ids=data, root=ROOT))
    assert listener.held == {*keys_of(first, ROOT), *keys_of(second, ROOT)}
    listener.hear(folder.evict(names(first, 16)[3:]))
    assert listener.held == set(keys_of(second, ROOT))
    folder.check()
    listener.hear(folder.evict(names(first, 16)[:1]))
    assert listener.held == set()
    folder.check()


def test_a_part_that_comes_back_makes_its_block_whole_again() -> None:
    folder, listener, data = Folder(keys_of), Listener(), tokens(128)
    parts = names(data, 32)
    listener.hear(folder.store(parts, token_ids=data, root=ROOT))
    changes = folder.evict(parts[:1])
    assert changes.has_hole
    listener.hear(changes)
    assert listener.held == {keys_of(data, ROOT)[1]}
    listener.hear(folder.store(parts[:1], token_ids=data[:128], root=ROOT))
    assert listener.held == set(keys_of(data, ROOT))
    folder.check()


def test_a_block_is_in_the_slowest_tier_of_its_parts() -> None:
    folder, listener, data = Folder(keys_of), Listener(), tokens(64)
    parts, (key,) = names(data, 32), keys_of(data, ROOT)
    listener.hear(folder.store(parts, token_ids=data, root=ROOT))
    # known hashes may come without their tokens
    listener.hear(folder.store(parts, tier="host"))
    assert listener.tiers["device"] == {key}
    listener.hear(folder.evict(parts[1:]))
    assert (listener.tiers["device"], listener.tiers["host"]) == (set(), {key})
    listener.hear(folder.evict(parts[:1]))
    listener.hear(folder.evict(parts, tier="host"))
    assert listener.held == set()
    folder.check()


def test_a_block_with_an_unknown_parent_is_an_orphan_and_does_no_harm() -> None:
    folder, data = Folder(keys_of), tokens(64)
    assert folder.store(["child"], parent="nobody", token_ids=data, root=ROOT).runs == []
    assert folder.store(["unknown"], tier="host").runs == []
    assert folder.evict(["unknown"]).runs == []
    assert folder.orphans == 2
    folder.check()


def test_tokens_that_are_not_those_of_equal_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens are not 2 equal blocks"):
        Folder(keys_of).store(["a", "b"], token_ids=tokens(33))
    with pytest.raises(ValueError, match="are not 1 equal blocks"):
        Folder(keys_of).store(["a"], token_ids=b"12345")


def test_a_cleared_folder_knows_nothing() -> None:
    folder, data = Folder(keys_of), tokens(64)
    folder.store(names(data, 16), token_ids=data, root=ROOT)
    folder.clear()
    assert folder.store(["x"], parent=names(data, 16)[0], token_ids=data).runs == []
    folder.check()


def test_a_full_folder_lets_go_of_what_it_heard_first() -> None:
    folder, listener = Folder(keys_of, most_parts=64), Listener()
    for seed in range(50):
        data = tokens(160, seed)
        listener.hear(folder.store(names(data, 16), token_ids=data, root=ROOT))
        folder.check()
        assert set(keys_of(data, ROOT)) <= listener.held
    assert len(listener.held) <= 16
    assert folder.dropped == 50 * 10 - 64


@pytest.mark.parametrize("seed", range(6))
def test_it_holds_what_is_whole_after_any_history(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([16, 32, 48, 80])
    folder, listener = Folder(keys_of), Listener()
    prompts = [tokens(size * 12, 1), tokens(size * 9, 2)]
    prompts += [prompts[0][: 4 * size * cut] + tokens(size * 7, 10 + cut) for cut in (1, 3, 5)]
    present: dict[Hashable, set[str]] = defaultdict(set)
    for _ in range(400):
        data, tier = rng.choice(prompts), rng.choice(["device", "device", "host"])
        parts = names(data, size)
        if rng.random() < 0.5:
            # an engine stores behind what it holds
            first = next((at for at, name in enumerate(parts) if not present[name]), len(parts))
            start = rng.randrange(first + 1)
            some = parts[start : start + rng.randrange(1, 6)]
            piece = data[4 * size * start : 4 * size * (start + len(some))]
            if not some:
                continue
            listener.hear(
                folder.store(some, parent=parts[start - 1] if start else None, token_ids=piece, root=ROOT, tier=tier)
            )
            for name in some:
                present[name].add(tier)
        else:
            some = rng.sample(parts, rng.randrange(1, 4)) if rng.random() < 0.3 else parts[-rng.randrange(1, 5) :][::-1]
            listener.hear(folder.evict(some, tier=tier))
            for name in some:
                present[name].discard(tier)
        folder.check()
        for prompt in prompts:
            spans = names(prompt, size)
            for number, key in enumerate(keys_of(prompt, ROOT)):
                inside = spans[number * 64 // size : -(-(number + 1) * 64 // size)]
                tiers = [present[name] for name in inside]
                whole = all(tiers)
                assert (key in listener.held) == whole, (seed, number)
                if whole:
                    fastest = ["device" if "device" in some_tiers else "host" for some_tiers in tiers]
                    assert key in listener.tiers["host" if "host" in fastest else "device"]


@pytest.mark.parametrize("seed", range(4))
def test_its_books_are_right_though_an_engine_reports_blocks_that_continue_themselves(seed: int) -> None:
    rng, folder, texts = (
        random.Random(seed),
        Folder(keys_of, most_parts=8),
        [tokens(400, seed=number) for number in range(3)],
    )
    for _ in range(600):
        some = [rng.randint(1, 8) for _ in range(rng.randint(1, 4))]
        tier = rng.choice(["device", "host", "elsewhere"])
        if rng.random() < 0.6:
            part = rng.choice(texts)[: 4 * len(some) * rng.choice([1, 16, 32, 64, 100])]
            folder.store(some, parent=rng.choice([None, *some]), token_ids=part, root=ROOT, tier=tier)
        else:
            folder.evict(some, tier=tier)
        folder.check()

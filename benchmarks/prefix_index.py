"""The prefix index against a chained-key table and a token radix tree in pure Python.

Loads `--blocks` blocks in documents of 200,000 tokens, each held by some of 100 backends, and looks prompts of the same
length up: held whole by three backends, by all, to 8 and to 100 different depths, and by none. If a dozen prompts are
held by the same backends to the same depths, the number of blocks with a set of holders does not determine their
depths, and the index must search by halves. For comparison in the same process: a dict from chained key to holders,
walked and searched by halves, a radix tree over tokens, and the cost of the answer alone, with its depths given. Twice:
with each look-up made once before it is timed, and after reading 64 MiB, so that no cache holds anything, not even
Python's own code. `--tiers` puts one block into host memory, since then all depths are kept by tier. The tree holds
`--tree-share` of the documents: it keeps the tokens themselves.


All times are processor times. `index_soak.py` runs a long sequence of events.

    python benchmarks/prefix_index.py
    python benchmarks/prefix_index.py --blocks 1000000
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from policies.prefix.index import PrefixIndex
from policies.prefix.match import Match
from shards.kv.keys import block_keys

PROMPT_TOKENS = 200_000
BLOCKS = PROMPT_TOKENS // 64
BACKENDS = [f"b{number}" for number in range(100)]
PAGE = 4096
ALIKE = 12
SPECIAL = 3 + 2 * ALIKE


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@dataclass(frozen=True)
class Document:
    """200,000 tokens, the same at each call, and the number of their blocks that each backend holds."""

    seed: int
    depths: dict[str, int]

    @property
    def tokens(self) -> bytes:
        return np.random.default_rng(self.seed).integers(0, 128_000, PROMPT_TOKENS, dtype="<u4").tobytes()

    @property
    def keys(self) -> tuple[int, ...]:
        return block_keys(self.tokens, 1)


class KeyedDict:
    """The floor: a dict from chained key to a mask of holders, without eviction of the oldest."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.bits = {name: 1 << place for place, name in enumerate(BACKENDS)}

    def store(self, backend: str, keys: Sequence[int]) -> None:
        bit, masks = self.bits[backend], self.masks
        for key in keys:
            masks[key] = masks.get(key, 0) | bit

    def walk(self, keys: Sequence[int]) -> dict[str, int]:
        """Block by block, until no backend is left."""
        alive, depths, get = -1, dict[int, int](), self.masks.get
        for depth, key in enumerate(keys):
            mask = get(key, 0) & alive
            if mask != alive:
                if alive != -1:
                    depths[depth] = alive & ~mask
                alive = mask
                if not mask:
                    break
        depths[len(keys)] = alive
        return self._named(depths)

    def halve(self, keys: Sequence[int]) -> dict[str, int]:
        """A binary search for each different holder set, from the deepest hit up."""
        get, depths, seen, high = self.masks.get, dict[int, int](), 0, len(keys)
        while high:
            low = 0
            # the deepest block held by a backend that was not seen yet
            while low < high:
                middle = (low + high) // 2
                if get(keys[middle], 0) & ~seen:
                    low = middle + 1
                else:
                    high = middle
            if not low:
                break
            depths[low] = get(keys[low - 1], 0) & ~seen
            seen |= depths[low]
            first = get(keys[0], 0)
            if not first & ~seen:
                break
            high = low
        return self._named(depths)

    def _named(self, depths: dict[int, int]) -> dict[str, int]:
        return {
            name: depth for depth, mask in depths.items() if mask > 0 for name, bit in self.bits.items() if mask & bit
        }


@dataclass(slots=True)
class Node:
    """An edge of the tree: tokens, their holders, and its continuations by first token."""

    tokens: bytes
    holders: int
    children: dict[bytes, Node] = field(default_factory=dict)


class RadixTree:
    """Token bytes, with shared beginnings stored once; a node is split where prompts or holders differ."""

    def __init__(self) -> None:
        self.root = Node(b"", 0)
        self.bits = {name: 1 << place for place, name in enumerate(BACKENDS)}
        self.bytes = 0

    def store(self, backend: str, tokens: bytes) -> None:
        node, at, bit = self.root, 0, self.bits[backend]
        while at < len(tokens):
            child = node.children.get(tokens[at : at + 4])
            if child is None:
                node.children[tokens[at : at + 4]] = Node(tokens[at:], bit)
                self.bytes += len(tokens) - at
                return
            same = common(child.tokens, tokens[at : at + len(child.tokens)])
            if same < len(child.tokens):
                rest = Node(child.tokens[same:], child.holders, child.children)
                child.tokens, child.children = child.tokens[:same], {rest.tokens[:4]: rest}
            child.holders |= bit
            node, at = child, at + same

    def longest(self, tokens: bytes) -> dict[str, int]:
        depths: dict[str, int] = {}
        node, at, alive = self.root, 0, -1
        while child := node.children.get(tokens[at : at + 4]):
            same = common(child.tokens, tokens[at : at + len(child.tokens)])
            gone = alive & ~child.holders if alive != -1 else 0
            if gone:
                depths.update((name, at // 256) for name, bit in self.bits.items() if gone & bit)
            alive, at = child.holders & alive, at + same
            if same < len(child.tokens):
                break
            node = child
        depths.update((name, at // 256) for name, bit in self.bits.items() if alive > 0 and alive & bit)
        return depths


def common(first: bytes, second: bytes) -> int:
    """The number of bytes of whole tokens that both begin with."""
    if first == second:
        return len(first)
    low, high = 0, min(len(first), len(second)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return 4 * low


def documents(blocks: int) -> Iterator[Document]:
    """Documents with `blocks` in total: most on one to three backends, a few special ones first."""
    rng = random.Random(1)
    everywhere = dict.fromkeys(BACKENDS, BLOCKS)
    yield Document(0, everywhere)
    yield Document(1, {name: BLOCKS - 300 * (place % 8) for place, name in enumerate(BACKENDS)})
    yield Document(2, {name: BLOCKS - 30 * place for place, name in enumerate(BACKENDS)})
    # other backends than in the two documents above go deepest, or the sets would be the same
    for seed in range(3, 3 + ALIKE):
        yield Document(seed, {name: BLOCKS - 300 * (place // 13) for place, name in enumerate(BACKENDS)})
    for seed in range(3 + ALIKE, 3 + 2 * ALIKE):
        yield Document(seed, {name: BLOCKS - 30 * (99 - place) for place, name in enumerate(BACKENDS)})
    for seed in range(SPECIAL, max(SPECIAL + 1, blocks // BLOCKS)):
        yield Document(seed, dict.fromkeys(rng.sample(BACKENDS, 3 if seed % 8 == 3 else rng.choice((1, 1, 2))), BLOCKS))


def answered(depths: dict[str, int]) -> dict[str, Match]:
    """The floor of any answer: as many Matches as there are depths, and a dict of names."""
    matches = {depth: Match(depth, depth, float(depth)) for depth in set(depths.values())}
    return {name: matches[depth] for name, depth in depths.items()}


def timed_ms(call: Callable[[], object]) -> float:
    """Milliseconds of processor time, so that other work on the machine does not look like a pause."""
    started = time.process_time()
    call()
    return 1000 * (time.process_time() - started)


def quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered) * 1000:9.1f} {ordered[int(0.99 * (len(ordered) - 1))] * 1000:9.1f}"


def depths_of(matches: dict[str, Match]) -> dict[str, int]:
    return {name: match.blocks for name, match in matches.items()}


def compare(blocks: int, rounds: int, tree_share: float, *, has_tiers: bool) -> None:
    made = list(documents(blocks))
    pairs = sum(sum(document.depths.values()) for document in made)
    print(f"{len(made) * BLOCKS:,} blocks of {len(made):,} documents, {pairs:,} (block, backend) pairs, 100 backends")
    index, table, tree = PrefixIndex(max_bytes=2**30), KeyedDict(), RadixTree()
    if has_tiers:
        index.store(BACKENDS[0], [1], "host")
    before = resident_bytes()
    stores = 0.0
    worst = 0.0
    for document in made:
        keys = document.keys
        for name, depth in document.depths.items():
            ms = timed_ms(lambda: index.store(name, keys[:depth]))  # noqa: B023
            stores, worst = stores + ms, max(worst, ms)
    used = resident_bytes() - before
    print(f"index: {1e6 * stores / pairs:.0f} ns per pair stored, {BLOCKS} blocks a call, slowest call {worst:.1f} ms")
    print(
        f"  resident {used / 2**20:.0f} MiB: {used / len(made) / BLOCKS:.1f} bytes a block, {used / pairs:.1f} a pair"
    )
    before, seconds = resident_bytes(), 0.0
    for document in made:
        keys = document.keys
        for name, depth in document.depths.items():
            seconds += timed_ms(lambda: table.store(name, keys[:depth]))  # noqa: B023
    used = resident_bytes() - before
    print(f"dict:  {1e6 * seconds / pairs:.0f} ns per pair stored; {used / (len(made) * BLOCKS):.1f} bytes per block")
    for document in made[: SPECIAL + int(tree_share * len(made))]:
        tokens = document.tokens
        for name, depth in document.depths.items():
            tree.store(name, tokens[: 256 * depth])
    print(f"tree:  {tree.bytes / 2**20:.0f} MiB of tokens for {tree_share:.0%} of the documents")
    warm = random.Random(2).sample(
        made[SPECIAL : SPECIAL + int(tree_share * len(made))], min(rounds, int(tree_share * len(made)))
    )
    cases = {
        "1 to 3 backends hold it whole": warm,
        "all 100 hold it whole": [made[0]] * rounds,
        "100 hold it to 8 depths": [made[1]] * rounds,
        "100 hold it to 100 depths": [made[2]] * rounds,
        "8 depths, a dozen prompts alike": (made[3 : 3 + ALIKE] * rounds)[:rounds],
        "100 depths, a dozen alike": (made[3 + ALIKE : SPECIAL] * rounds)[:rounds],
        "no backend holds it": [Document(10**6 + at, {}) for at in range(rounds)],
    }
    for caches, prepare in {"caches warm": warmed, "caches flushed": flush}.items():
        look_up(cases, (index, table, tree), caches, prepare)


def look_up(
    cases: dict[str, list[Document]],
    parts: tuple[PrefixIndex, KeyedDict, RadixTree],
    caches: str,
    prepare: Callable[[Callable[[], object]], None],
) -> None:
    """A row for each case, every answer checked."""
    index, table, tree = parts
    names = ("keys known", "with hashing", "dict walked", "by halves", "radix tree", "answer alone")
    print(f"\n{f'us, P50 and P99, {caches}':32}" + "  ".join(f"{name:>19}" for name in names))
    for name, asked in cases.items():
        columns: list[list[float]] = [[] for _ in names]
        for document in asked:
            tokens = document.tokens
            keys = block_keys(tokens, 1)
            matches = depths_of(dict(index.longest(keys)))
            assert matches == document.depths == table.walk(keys) == table.halve(keys) == tree.longest(tokens), name
            calls = (
                lambda: index.longest(keys),  # noqa: B023
                lambda: index.longest(block_keys(tokens, 1)),  # noqa: B023
                lambda: table.walk(keys),  # noqa: B023
                lambda: table.halve(keys),  # noqa: B023
                lambda: tree.longest(tokens),  # noqa: B023
                lambda: answered(document.depths),  # noqa: B023
            )
            for column, call in zip(columns, calls, strict=True):
                prepare(call)
                column.append(timed_ms(call))
        print(f"{name:32}" + "  ".join(map(quantiles, columns)))


FLUSHED = np.zeros(2**23)


def warmed(call: Callable[[], object]) -> None:
    """Make each look-up once before it is timed."""
    call()


def flush(_: Callable[[], object]) -> None:
    """Read more memory than the caches hold, so that they contain nothing of earlier look-ups."""
    FLUSHED.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tree-share", type=float, default=0.1)
    parser.add_argument("--tiers", action="store_true")
    asked = parser.parse_args()
    compare(asked.blocks, asked.rounds, asked.tree_share, has_tiers=asked.tiers)


if __name__ == "__main__":
    main()

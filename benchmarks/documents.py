"""Orders of documents: how near the best they come, what they take, and what they add to the hit rate.

    python benchmarks/documents.py [--sets 1000] [--prompts 3000]

1. Random sets of 2 to 7 documents, in a fleet that holds random prompts of such documents: held blocks of the chosen
   order as a share of those of the best of all orders.
2. Processor time of one choice among 50 documents: in a fleet with 2,000 prompts of 50 documents of 1,000 by Zipf's
   law, and where a backend holds all 50 in an order of its own.
3. Prompts of k documents of 1,000, chosen by Zipf's law and ranked at random, through one cache that evicts the block
   which was used longest ago: share of the documents' tokens that were cached, for each way to order them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from policies.documents import best_order
from policies.learning.document_uses import DocumentUses
from policies.prefix.held_blocks import HeldBlocks
from policies.prefix.index import PrefixIndex
from shards.kv.keys import TOKEN_BYTES, block_keys

ROOT = 7
START = random.Random(1).randbytes(150 * TOKEN_BYTES)


def a_document(rng: random.Random) -> bytes:
    """Ids of 100 to 500 tokens."""
    return rng.randbytes(TOKEN_BYTES * rng.randrange(100, 500))


def by_zipf(rng: random.Random, documents: int, count: int, exponent: float = 1.0) -> list[int]:
    """`count` different documents, the first of all the most popular; in random order."""
    found: dict[int, None] = {}
    weights = list(itertools.accumulate((at + 1) ** -exponent for at in range(documents)))
    while len(found) < count:
        found |= dict.fromkeys(rng.choices(range(documents), cum_weights=weights, k=count))
    return rng.sample(list(found)[:count], count)


def held_by_best(order: Sequence[bytes], index: PrefixIndex) -> int:
    """The most blocks that one backend holds of the prompt with the documents in this order."""
    matches = index.longest(block_keys(START + b"".join(order), ROOT))
    return max((match.blocks for match in matches.values()), default=0)


def near_the_best(sets: int) -> None:
    """Print the first figures."""
    rng, shares, found_sum, best_sum = random.Random(2), list[float](), 0, 0
    while len(shares) < sets:
        documents = [a_document(rng) for _ in range(20)]
        index = PrefixIndex(max_bytes=2**22)
        for number in range(200):
            sent = [documents[at] for at in by_zipf(rng, 20, rng.randrange(2, 10))]
            index.store(f"b{number % 8}", block_keys(START + b"".join(sent), ROOT))
        for _ in range(20):
            asked = [documents[at] for at in by_zipf(rng, 20, rng.randrange(2, 8))]
            chosen = best_order(START, asked, root=ROOT, holders=HeldBlocks(*index.holders(), ()))
            held = held_by_best([asked[place] for place in chosen.places], index)
            best = max(held_by_best(order, index) for order in itertools.permutations(asked))
            assert held == chosen.held
            found_sum, best_sum = found_sum + held, best_sum + best
            shares.append(held / best)
    print(
        f"{sets} sets of 2 to 7 documents: {found_sum} of {best_sum} blocks, "
        f"{found_sum / best_sum:.4f} of the best order"
    )
    print(f"  worst set {min(shares):.4f}, sets below 0.95: {sum(share < 0.95 for share in shares)}")


def time_of_choices() -> None:
    """Print the second figures."""
    rng, index = random.Random(3), PrefixIndex()
    documents = [a_document(rng) for _ in range(1000)]
    for number in range(2000):
        sent = [documents[at] for at in by_zipf(rng, 1000, 50)]
        index.store(f"b{number % 8}", block_keys(START + b"".join(sent), ROOT))
    holders = HeldBlocks(*index.holders(), ())
    asked = [[documents[at] for at in by_zipf(rng, 1000, 50)] for _ in range(500)]
    show_times("50 documents of 1,000 by Zipf's law", asked, holders)
    whole = [a_document(rng) for _ in range(50)]
    index.store("b0", block_keys(START + b"".join(whole), ROOT))
    holders = HeldBlocks(*index.holders(), ())
    show_times("50 documents, all held in one order", [rng.sample(whole, 50) for _ in range(500)], holders)


def show_times(what: str, asked: Sequence[Sequence[bytes]], holders: HeldBlocks) -> None:
    """Print the times of one choice, and the share of blocks that is held then."""
    seconds, held = list[float](), 0
    for documents in asked:
        began_at = time.thread_time()
        held += best_order(START, documents, root=ROOT, holders=holders).held
        seconds.append(time.thread_time() - began_at)
    blocks = sum((len(START) + sum(map(len, documents))) // 256 for documents in asked)
    times = statistics.quantiles(seconds, n=100)
    print(
        f"{what}: median {1e3 * times[49]:.2f} ms, P95 {1e3 * times[94]:.2f} ms, worst {1e3 * max(seconds):.2f} ms; "
        f"{held / blocks:.3f} of the blocks held"
    )


class Lru:
    """The blocks of one cache; the block that was used longest ago goes first."""

    all = 1

    def __init__(self, most: int) -> None:
        self.most = most
        self.keys: OrderedDict[int, None] = OrderedDict()

    def of(self, key: int, depth: int, among: int) -> int:  # noqa: ARG002 - see Holders
        """`among`, if it has the block."""
        return among if key in self.keys else 0

    def run(self, keys: Sequence[int]) -> int:
        """Compute a prompt; returns the number of its blocks that were there."""
        cached = sum(1 for _ in itertools.takewhile(self.keys.__contains__, keys))
        # of one prompt the last block goes first
        for key in reversed(keys):
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > self.most:
            self.keys.popitem(last=False)
        return cached


Way = Callable[[Lru, DocumentUses, list[int], list[bytes]], list[int]]
"""(cache, uses, numbers of documents as ranked, all documents) -> the order."""


def as_ranked(cache: Lru, uses: DocumentUses, asked: list[int], documents: list[bytes]) -> list[int]:  # noqa: ARG001
    """`document_order: fixed`."""
    return asked


def popular_first(cache: Lru, uses: DocumentUses, asked: list[int], documents: list[bytes]) -> list[int]:  # noqa: ARG001
    """Popular documents first, whatever is cached."""
    return [asked[place] for place in uses.preferred(ROOT, asked, None, 0.0).places]


def searched(cache: Lru, uses: DocumentUses, asked: list[int], documents: list[bytes]) -> list[int]:  # noqa: ARG001
    """The best order in the cache; what is not held follows as ranked."""
    found = best_order(START, [documents[at] for at in asked], root=ROOT, holders=cache)
    return [asked[place] for place in found.places]


def both(cache: Lru, uses: DocumentUses, asked: list[int], documents: list[bytes]) -> list[int]:
    """`document_order: any`."""
    return searched(cache, uses, popular_first(cache, uses, asked, documents), documents)


def hit_rates(prompts: int) -> None:
    """Print the third figures."""
    ways: tuple[Way, ...] = (as_ranked, popular_first, searched, both)
    print(f"\n{prompts} prompts, documents of 1,000 by Zipf's law; cached share of the documents' tokens")
    print("| exponent | cache, tokens | k | as ranked | popular first | searched | searched, then popular |")
    print("|---|---|---|---|---|---|---|")
    for exponent, blocks, count in itertools.product((0.8, 1.2), (8_000, 64_000), (3, 10, 30)):
        shares = [hit_rate(way, prompts, exponent, blocks, count) for way in ways]
        cells = " | ".join(f"{share:.3f}" for share in shares)
        print(f"| {exponent:g} | {64 * blocks:,} | {count} | {cells} |")


def hit_rate(way: Way, prompts: int, exponent: float, blocks: int, count: int) -> float:
    """The share of the documents' tokens that were cached, if each prompt's documents are ordered so."""
    rng, cache, uses, cached, total = random.Random(5), Lru(blocks), DocumentUses(), 0, 0
    documents = [a_document(rng) for _ in range(1000)]
    before = len(block_keys(START, ROOT))
    for number in range(prompts):
        order = way(cache, uses, by_zipf(rng, 1000, count, exponent), documents)
        uses.used(ROOT, order, None, 0.0)
        keys = block_keys(START + b"".join(documents[at] for at in order), ROOT)
        held = cache.run(keys)
        # the cache fills first
        if number >= prompts // 4:
            cached, total = cached + max(0, held - before), total + len(keys) - before
    return cached / total


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=3000)
    options = parser.parse_args()
    near_the_best(options.sets)
    time_of_choices()
    hit_rates(options.prompts)


if __name__ == "__main__":
    main()

"""Random sequences of fetch, evict, kill, cancel and clear on three engines that exchange KV.

After every step the books of the engine are checked; after every sequence each answer is compared with the one that a
network without any cache gives, and nothing may be held. A new cache domain never finds a cached block, wherever it
fetches from. The seed of a sequence that fails is printed.

    python -m benchmarks.kv_fetch_soak --sequences 10000
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from shards.exec.fake import FakeNetwork
from shards.nouns import FinishReason, KvSource
from tests.shards.driver import Driver, some_tokens

_LIMIT_S = 30.0
_PAUSED_S = 6.0
_NEW = 3


class Soak:
    """Three engines with little memory, so that blocks are evicted; a killed one is replaced at once."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.prompts = [some_tokens(self.rng.randrange(100, 900), number) for number in range(16)]
        self.answers = [FakeNetwork().answer(prompt, _NEW) for prompt in self.prompts]
        self.drivers = [a_driver() for _ in range(3)]
        self.counts: Counter[str] = Counter()

    def sequence(self, seed: int) -> None:
        """One sequence. Raises AssertionError if anything is wrong afterwards."""
        rng = self.rng = random.Random(seed)
        asked: dict[str, tuple[Driver, int, bool]] = {}
        for driver in self.drivers:
            # so that peers that have failed are asked again
            driver.clock.now_s += _PAUSED_S
        for number in range(rng.randrange(2, 7)):
            key, driver, which = f"{seed}-{number}", rng.choice(self.drivers), rng.randrange(len(self.prompts))
            is_new = rng.random() < 0.15
            domain = f"new {key}" if is_new else rng.choice("ab")
            source = KvSource(address_of(rng.choice(self.drivers)), rng.randrange(1000))
            driver.ask(key, self.prompts[which], new=_NEW, domain=domain, source=source)
            asked[key] = (driver, which, is_new)
            for _ in range(rng.randrange(6)):
                rng.choice(self.drivers).step()
            self._disturb(asked, domain)
        self._settle(asked)
        for key, (driver, which, is_new) in asked.items():
            end, answer = driver.ended[key, 0], driver.drawn[key, 0]
            assert answer == self.answers[which][: len(answer)], f"{key} got a wrong answer"
            assert end.reason in (FinishReason.LENGTH, FinishReason.CANCELLED), end
            assert not (is_new and end.cached_tokens), f"{key} found a block of another domain"
            self.counts["cached tokens"] += end.cached_tokens
            driver.ended.pop((key, 0))
            driver.drawn.pop((key, 0))
            driver.progress.pop(key, None)
        for driver in self.drivers:
            driver.assert_nothing_is_held()
            driver.draws.clear()
            driver.network.computed.clear()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End all engines."""
        for driver in self.drivers:
            self._end(driver)

    def _disturb(self, asked: dict[str, tuple[Driver, int, bool]], domain: str) -> None:
        rng = self.rng
        if rng.random() < 0.15:
            key = rng.choice(list(asked))
            asked[key][0].engine.cancel(key)
            self.counts["cancelled"] += 1
        if rng.random() < 0.05:
            rng.choice(self.drivers).engine.clear_cache(rng.choice([None, domain]))
            self.counts["cleared"] += 1
        if rng.random() < 0.03:
            at = rng.randrange(len(self.drivers))
            killed, self.drivers[at] = self.drivers[at], a_driver()
            self._end(killed)
            for key in [key for key, (driver, _, _) in asked.items() if driver is killed]:
                del asked[key]
            self.counts["killed"] += 1

    def _settle(self, asked: dict[str, tuple[Driver, int, bool]]) -> None:
        until_s = time.monotonic() + _LIMIT_S
        while any((key, 0) not in driver.ended for key, (driver, _, _) in asked.items()) or any(
            driver.engine._pool.is_moving for driver in self.drivers
        ):
            for driver in self.drivers:
                driver.step()
            time.sleep(0.0001)
            assert time.monotonic() < until_s, f"still at work: {[driver.engine for driver in self.drivers]}"

    def _end(self, driver: Driver) -> None:
        use = driver.engine._pool.peers.use
        assert use is not None
        self.counts["fetched blocks"] += use.blocks
        self.counts["not fetched"] += use.failed
        self.counts["lent blocks"] += driver.engine._pool.lending.lent
        driver.engine.close()
        driver.engine.check()


def a_driver() -> Driver:
    """An engine that exchanges KV."""
    return Driver(kv_blocks=24, host_bytes=1 << 15, kv_listen=("127.0.0.1", 0), kv_secret=b"of the soak")


def address_of(driver: Driver) -> str:
    """Where other shards fetch its KV."""
    assert driver.engine.kv_address is not None
    return driver.engine.kv_address


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    soak, started = Soak(), time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.sequences):
        try:
            soak.sequence(seed)
        except AssertionError:
            print(f"sequence {seed} failed")
            raise
    soak.close()
    print(f"{arguments.sequences} sequences in {time.monotonic() - started:.0f} s: {dict(soak.counts)}")


if __name__ == "__main__":
    main()

"""The long prompts that backends compute at this moment, for requests with prompts that begin alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from policies.bursts import LEAST_TOKENS, Underway
from policies.nouns import Request
from policies.prefix.rungs import Rungs
from router.fleet.cluster.flights import Flight

_LATE_SHARE = 0.1
"""A prompt that takes longer than predicted is expected to take this share of the past time more."""


_RUNGS = Rungs(256, 16)
"""The blocks by which a prompt is found: all of the first 16,384 tokens, then one of every 1,024."""


class Computing:
    """Flights with much to compute, from their begin to their first token, by the block keys of their prompts.

    `on_left` is called with each flight that is no longer among them, and whether its prompt is computed.
    """

    def __init__(self, on_left: Callable[[Flight, bool], None] = lambda *_: None) -> None:
        self._on_left = on_left
        self.flights: dict[Flight, Sequence[int]] = {}
        """All of them, and the keys by which each is found: changed here alone."""
        # one tuple for all blocks that the same flights compute: a long prompt has hundreds
        self._by_key: dict[int, tuple[Flight, ...]] = {}

    def __repr__(self) -> str:
        return f"<Computing {len(self.flights)} prompts>"

    def __len__(self) -> int:
        return len(self.flights)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def began(self, flight: Flight) -> None:
        """`flight` was sent now; only one with much to compute is remembered."""
        if flight.uncached_tokens < LEAST_TOKENS or not flight.request.block_keys:
            return
        flight.on_computed = self._computed
        self.flights[flight] = keys = _RUNGS.of(flight.request.block_keys)
        shared = self._rungs(keys)
        for key in keys[:shared]:
            self._by_key[key] += (flight,)
        self._by_key.update(dict.fromkeys(keys[shared:], (flight,)))

    def ended(self, flight: Flight) -> None:
        """`flight` is over, whether or not it was remembered."""
        self._leave(flight, is_computed=False)

    def of(self, request: Request, now: float) -> tuple[Underway, ...]:
        """The longest beginning of the prompt of `request`, up to a rung, that is being computed, and where: for
        requests of its rank or a better one, because others may stand still for long."""
        if not self.flights:
            return ()
        keys = _RUNGS.of(request.block_keys)
        rungs = self._rungs(keys)
        if not rungs:
            return ()
        blocks = _RUNGS.blocks(rungs)
        tokens = min(request.prompt_tokens, blocks * request.prompt_tokens // len(request.block_keys))
        return tuple(
            Underway(flight.backend, tokens, _left_s(flight, now))
            for flight in self._by_key[keys[rungs - 1]]
            if flight.request.rank <= request.rank and not (flight.is_silent and _is_due(flight, now))
        )

    def check(self) -> None:
        """Assert that every remembered flight waits for its first token, and is found by each of its keys."""
        found = {flight for flights in self._by_key.values() for flight in flights}
        assert found == self.flights.keys(), f"{self!r}: keys and flights differ"
        assert all(self._by_key.values()), f"{self!r}: remembers a key of no flight"
        assert all(flight.is_waiting for flight in self.flights), f"{self!r}: remembers a prompt that is computed"

    def _rungs(self, keys: Sequence[int], flights: int = 1) -> int:
        """How many of the first `keys` at least so many flights compute: one with a block has all in front of it."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            is_found = len(self._by_key.get(keys[middle - 1], ())) >= flights
            low, high = (middle, high) if is_found else (low, middle - 1)
        return low

    def _computed(self, flight: Flight) -> None:
        self._leave(flight, is_computed=True)

    def _leave(self, flight: Flight, *, is_computed: bool) -> None:
        keys = self.flights.pop(flight, None)
        if keys is None:
            return
        shared = self._rungs(keys, 2)
        for key in keys[:shared]:
            self._by_key[key] = tuple([other for other in self._by_key[key] if other is not flight])
        deque(map(self._by_key.__delitem__, keys[shared:]), maxlen=0)
        self._on_left(flight, is_computed)


def _is_due(flight: Flight, now: float) -> bool:
    return now >= flight.sent_at + flight.predicted_ttft_s


def _left_s(flight: Flight, now: float) -> float:
    """Seconds until the first token of `flight`, as predicted when it was sent, or more where it is late."""
    passed_s = now - flight.sent_at
    return max(flight.predicted_ttft_s - passed_s, _LATE_SHARE * passed_s)

"""The answer of one backend is accounted for and passed on, as fast as its caller takes it."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policies.nouns import ACCEPTED, Delta, Sampling
from router.call.carrier import Delivery
from router.call.hedging import Beaten, Race
from router.call.observer import Account
from router.call.so_far import SoFar

TOKEN = Delta(text="a", tokens=1)


class Reader:
    """A caller that takes what it is written at once, or when it is awaited."""

    def __init__(self, *, is_slow: bool) -> None:
        self.got: list[Delta] = []
        self._is_slow = is_slow

    def write(self, index: int, delta: Delta) -> Coroutine[Any, Any, None] | None:
        if self._is_slow:
            return self._take(delta)
        self.got.append(delta)
        return None

    async def _take(self, delta: Delta) -> None:
        self.got.append(delta)


class Flown:
    """A flight that notes what it hears."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.heard_of: list[Delta] = []
        self.is_relayed = True
        self.drawn_tokens = 0

    def heard(self, delta: Delta, now: float) -> None:
        self.heard_of.append(delta)
        self.first_at = now

    def hold(self) -> None:
        self.is_relayed = False

    def relayed(self, now: float) -> None:
        self.is_relayed = True


def an_account() -> Account:
    return Account("r", 0.0, {}, None, lambda *_: None)


class Stage:
    """Deliveries of two attempts in one race; the second may take the lead."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.reader, self.flight, self.account = Reader(is_slow=is_slow), Flown(), an_account()
        request = SimpleNamespace(id="r", sampling=Sampling())
        self.so_far = SoFar()
        bid = SimpleNamespace(echo="", prompt=SimpleNamespace(beginning=None), request=request, so_far=self.so_far)
        self.placed: Any = [SimpleNamespace(bid=bid, flight=self.flight) for _ in range(2)]
        self.flight.give_up = None  # type: ignore[attr-defined]
        nothing = cast("Any", None)
        self.won = list[Any]()
        self.race = Race(self.placed[0], nothing, find_second=nothing, on_won=self.won.append, late_s=1.0)

    def delivery(self, number: int = 0) -> Delivery:
        ask = cast("Any", None)
        caller = cast("Any", self.reader)
        return Delivery(
            cast("Any", self.flight),
            caller=caller,
            ask=ask,
            at=0,
            placed=self.placed[number],
            race=self.race,
            account=self.account,
            attempt=None,
            clock=lambda: 5.0,
        )


def test_pieces_are_accounted_for_and_passed_on() -> None:
    stage = Stage()
    delivery = stage.delivery()
    assert all(delivery.take(delta) for delta in (ACCEPTED, Delta(text="again", is_repeat=True), TOKEN, TOKEN))
    assert stage.reader.got == [TOKEN, TOKEN]
    assert stage.flight.heard_of == [ACCEPTED, TOKEN, TOKEN]
    assert (stage.so_far.tokens, stage.account.first_at, stage.flight.is_relayed, stage.won) == (2, 5.0, True, [])


async def test_while_the_caller_reads_slowly_the_time_is_not_the_backends() -> None:
    stage = Stage(is_slow=True)
    delivery = stage.delivery()
    assert not delivery.take(TOKEN)
    assert not stage.flight.is_relayed
    await delivery.ready()
    assert stage.flight.is_relayed
    assert stage.reader.got == [TOKEN]
    await delivery.ready()
    delivery.close()


def test_what_was_not_taken_at_the_end_is_dropped() -> None:
    stage = Stage(is_slow=True)
    delivery = stage.delivery()
    assert not delivery.take(TOKEN)
    # a coroutine that is neither awaited nor closed is a warning, which is an error here
    delivery.close()
    assert stage.reader.got == []


def test_the_first_piece_takes_the_lead_and_the_other_attempt_is_beaten() -> None:
    stage = Stage()
    first, second = stage.delivery(0), stage.delivery(1)
    progress = Delta(computed_tokens=3)
    assert first.take(progress)
    assert second.take(progress)
    assert stage.reader.got == [progress]
    assert second.take(TOKEN)
    assert stage.won == [stage.placed[1]]
    with pytest.raises(Beaten):
        first.take(TOKEN)
    assert stage.reader.got == [progress, TOKEN]

from __future__ import annotations

import random

from backends.reconnect import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_success() -> None:
    backoff = Backoff(random.Random(1), first_s=0.1, longest_s=1.0)
    pauses = [backoff.next_s() for _ in range(8)]
    for step_s, pause_s in zip([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], pauses, strict=True):
        assert step_s / 2 <= pause_s <= step_s
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_an_attempt_that_took_long_is_followed_by_the_next_one_soon() -> None:
    backoff = Backoff(random.Random(1), first_s=0.1, longest_s=2.0)
    for _ in range(8):
        backoff.next_s()
    assert 0.25 <= backoff.next_s(spent_s=1.5) <= 0.5
    assert 0.05 <= backoff.next_s(spent_s=60.0) <= 0.1


def test_two_routers_do_not_come_back_in_step() -> None:
    assert Backoff(random.Random(1)).next_s() != Backoff(random.Random(2)).next_s()

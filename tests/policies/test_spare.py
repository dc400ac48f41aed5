"""Spare capacity: what is left for lines of batches."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from policies.nouns import BackendView
from policies.spare import Spare, rests
from tests.policies.builders import BACKEND

NOW = next(float(at) for at in range(40) if not rests("a", at))


def a_backend(**fields: Any) -> BackendView:
    return replace(BACKEND, **{"max_requests": 64, **fields})


def grown(rounds: int, *, most: float | None, waits: bool = False) -> Spare:
    spare = Spare()
    for second in range(rounds):
        spare.room(a_backend(), int(spare.window("a")), NOW, is_shared=False)
        spare.tick("a", float(second), most=most, waits=waits)
    return spare


def test_a_backend_that_only_has_lines_doubles_them_up_to_its_limit() -> None:
    spare = grown(6, most=None)
    assert spare.window("a") == 128.0
    # one place in eight stays free
    assert spare.room(a_backend(), 0, NOW, is_shared=False) == 56


def test_a_backend_that_others_use_gets_one_more_line_each_second_up_to_what_they_do_not_notice() -> None:
    assert grown(4, most=50.0).window("a") == 6.0
    assert grown(40, most=9.5).window("a") == 9.5


def test_a_window_that_is_not_filled_does_not_grow() -> None:
    spare = Spare()
    for second in range(10):
        spare.room(a_backend(), 0, NOW, is_shared=False)
        spare.tick("a", float(second), most=None, waits=False)
    assert spare.window("a") == 2.0


def test_lines_give_way_while_others_wait() -> None:
    spare = grown(6, most=None)
    spare.tick("a", 10.0, most=None, waits=True)
    assert spare.window("a") == 64.0
    spare.tick("a", 10.5, most=None, waits=True)
    assert spare.window("a") == 64.0, "once in a second"
    for second in range(11, 30):
        spare.tick("a", float(second), most=None, waits=True)
    assert spare.window("a") == 0.25


def test_a_backend_is_avoided_while_its_window_is_full_or_it_rests() -> None:
    spare, rest_at = Spare(), next(float(at) for at in range(40) if rests("a", at))
    seen = [spare.avoids(a_backend(running=lines), lines, NOW, is_shared=True) for lines in range(4)]
    assert seen == [False, False, True, True]
    assert spare.avoids(a_backend(), 0, rest_at, is_shared=True)
    assert not spare.avoids(a_backend(), 0, rest_at, is_shared=False)
    # a prompt that is computed there is no reason to compute its documents elsewhere
    assert not spare.avoids(a_backend(queue_s=1.0), 0, NOW, is_shared=True)


def test_a_small_window_is_one_line_at_an_idle_backend() -> None:
    spare = grown(10, most=None, waits=True)
    assert spare.room(a_backend(), 0, NOW, is_shared=False) == 1
    assert spare.room(a_backend(running=1), 0, NOW, is_shared=False) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"healthy": False},
        {"draining": True},
        {"may_take": 0},
        {"needs_prefill": True},
        {"waiting": 1},
        {"running": 56},
        {"max_requests": None, "adaptive_limit": 4, "running": 3},
    ],
)
def test_a_backend_without_room_gets_none(fields: dict[str, Any]) -> None:
    assert grown(6, most=None).room(a_backend(**fields), 0, NOW, is_shared=False) == 0


def test_a_backend_that_computes_a_prompt_of_others_gets_none() -> None:
    spare = grown(6, most=None)
    assert spare.room(a_backend(queue_s=0.01), 0, NOW, is_shared=True) == 0
    assert spare.room(a_backend(), 0, NOW, is_shared=True, computed=1) == 0
    assert spare.room(a_backend(), 0, NOW, is_shared=True) == 1
    # among lines alone it does not matter
    assert spare.room(a_backend(queue_s=0.01), 0, NOW, is_shared=False, computed=1) == 56


def test_a_shared_backend_rests_a_tenth_of_the_time() -> None:
    times = [second / 10 for second in range(2000)]
    assert sum(rests("a", at) for at in times) == 200
    at = next(filter(lambda at: rests("a", at), times))
    assert Spare().room(a_backend(), 0, at, is_shared=True) == 0
    assert Spare().room(a_backend(), 0, at, is_shared=False) == 2


def test_backends_that_are_gone_are_forgotten() -> None:
    spare = grown(6, most=None)
    spare.follow({"b"})
    assert spare.window("a") == 2.0

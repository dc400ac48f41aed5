from __future__ import annotations

from backends.events.nouns import CacheEvent, Cleared, Removed, Stored
from router.fleet.feeds.groups import DecidingGroup


def stored(group: int | None, window: int | None) -> Stored:
    return Stored((1,), None, b"", 0, group=group, window=window)


def admitted(*events: CacheEvent) -> list[CacheEvent]:
    group = DecidingGroup()
    return [passed for event in events for passed in group.admit(event)]


def test_without_groups_everything_counts() -> None:
    events = [stored(None, None), Removed((1,)), Cleared()]
    assert admitted(*events) == events


def test_the_group_that_sees_everything_decides() -> None:
    full, sliding = stored(0, None), stored(1, 128)
    assert admitted(full, sliding, Removed((1,), group=1), Removed((1,), group=0)) == [full, Removed((1,), group=0)]


def test_a_wider_group_that_shows_up_later_takes_over() -> None:
    narrow, wide = stored(512, 512), stored(4096, 4096)
    assert admitted(narrow, wide, Removed((1,), group=512)) == [narrow, Cleared(), wide]


def test_of_two_that_see_everything_the_first_decides() -> None:
    first, second = stored(0, None), stored(3, None)
    assert admitted(first, second) == [first]


def test_a_state_that_no_prefix_can_be_found_in_never_decides() -> None:
    assert admitted(stored(1, 0), Removed((1,), group=1)) == []

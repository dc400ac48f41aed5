"""Lines that wait: tenants in turn, lines in their order, and only those that have room."""

from __future__ import annotations

from router.batches.line_places import LinePlaces
from router.batches.line_queue import LineQueue


def names(queue: LineQueue) -> list[str]:
    found = []
    while (waiting := queue.take(lambda _: True)) is not None:
        found.append(waiting.line)
    return found


async def test_tenants_take_turns_and_the_lines_of_each_keep_their_order() -> None:
    queue = LineQueue()
    for line in ("a1", "a2", "a3", "b1", "b2"):
        queue.push(line, line[0], "m", None)
    assert len(queue) == 5
    assert names(queue) == ["a1", "b1", "a2", "b2", "a3"]
    assert len(queue) == 0


async def test_a_line_without_room_is_passed_by_those_of_other_kinds() -> None:
    queue, own = LineQueue(), LinePlaces("m", ("own",))
    queue.push("first", "a", "m", own)
    queue.push("second", "a", "m", None)
    queue.push("third", "a", "other", None)
    assert [waiting.line for waiting in queue.first()] == ["first", "second", "third"]
    found = queue.take(lambda waiting: waiting.places is None)
    assert found is not None
    assert found.line == "second"
    assert queue.take(lambda _: False) is None
    assert names(queue) == ["first", "third"]


async def test_a_line_that_waits_no_more_is_not_taken() -> None:
    queue = LineQueue()
    first, second = (queue.push(line, "a", "m", None) for line in ("first", "second"))
    assert queue.is_first(first)
    assert not queue.is_first(second)
    queue.remove(first)
    queue.remove(first)
    assert queue.is_first(second)
    assert len(queue) == 1
    assert names(queue) == ["second"]


async def test_a_look_at_the_queue_asks_once_for_each_kind() -> None:
    queue, asked = LineQueue(), list[str]()
    for number in range(1000):
        queue.push(f"line-{number}", "a", f"m{number % 2}", None)
    assert queue.take(lambda waiting: bool(asked.append(waiting.line))) is None
    assert asked == ["line-0", "line-1"]

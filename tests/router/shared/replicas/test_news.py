"""Messages between routers of different versions, and messages that no router sent."""

from __future__ import annotations

import msgspec
import pytest

from router.fleet.belief_news import Sent
from router.fleet.cluster.flights import Traffic
from router.shared.replicas.news import Batch, Running, batches, decode, encode


def test_a_message_has_what_was_reported() -> None:
    running = Running({"a": Traffic(1)}, {"b": Traffic(2, 1, 300, 9.5)})
    (batch,) = batches([(9.75, Sent("a", (1, 2)))], running, 10.0)
    assert decode(encode(batch)) == Batch(
        ((250, Sent("a", (1, 2))),), {"a": Traffic(1)}, {"b": Traffic(2, 1, 300, 9.5)}
    )


def test_a_sign_of_life_has_nothing_in_it() -> None:
    (batch,) = batches([], Running(), 10.0)
    assert decode(encode(batch)) == Batch()
    assert list(batches([], None, 10.0)) == []


def test_a_router_that_knows_no_changes_is_understood() -> None:
    older = msgspec.msgpack.encode([[], {"a": [1, 0, 0, 0.0]}])
    assert decode(older) == Batch((), {"a": Traffic(1)}, {})


def test_what_a_newer_router_adds_at_the_end_is_skipped() -> None:
    newer = msgspec.msgpack.encode([[], None, {}, {"more": 1}])
    assert decode(newer) == Batch()


def test_kinds_of_news_that_only_a_newer_router_knows_are_skipped() -> None:
    newer = msgspec.msgpack.encode([[[3, ["later", 1, 2]], [4, ["sent", "a", [7]]]], None, {"b": [1, 0, 0, 0.0]}])
    assert decode(newer) == Batch(((4, Sent("a", (7,))),), None, {"b": Traffic(1)})


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", b"\x93\x90\xc0" + 5000 * b"\x91" + b"\xc0", b"\x94\x90\xc0\x80" + 100_000 * b"\x91" + b"\xc0"],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode(payload)

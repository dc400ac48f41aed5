"""The collector leaves alone what a process is made of, and still finds what requests leave behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shards.collector import NEW_OBJECTS, spare_what_stays


class Loop:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    # tests/conftest.py spares all tests
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.freeze()


def test_what_is_there_is_looked_at_no_more_and_what_comes_later_is_freed() -> None:
    assert gc.get_freeze_count() == 0
    spare_what_stays()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] == NEW_OBJECTS
    later = weakref.ref(Loop())
    assert later() is not None
    gc.collect()
    assert later() is None


def test_what_was_garbage_before_is_not_kept() -> None:
    before = weakref.ref(Loop())
    spare_what_stays()
    assert before() is None

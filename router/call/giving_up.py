"""The end of a wait for a backend that is late, ill or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.fleet.cluster.flights import Flight


@contextmanager
def until_given_up(flight: Flight, can_move: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raise what `flight` is given up with, as soon as it is; `can_move`: could another backend go on?"""
    task = asyncio.current_task()
    assert task is not None, "a call runs in a task"
    given_up: BaseException | None = None

    def give_up(failure: BaseException) -> None:
        nonlocal given_up
        if given_up is None and task.cancel():
            given_up = failure

    flight.give_up, flight.can_move = give_up, can_move
    try:
        yield
    except asyncio.CancelledError as error:
        # the client may have left in the same moment
        if given_up is None or task.uncancel() > 0:
            raise
        raise given_up from error
    finally:
        flight.give_up = None

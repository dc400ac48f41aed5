"""The end of a wait for a backend that is late, ill or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from router.fleet.cluster.flights import Flight


def _always() -> bool:
    return True


class UntilGivenUp:
    """A context manager that raises what `flight` is given up with, as soon as it is; `can_move`: could another backend
    go on?
    """

    __slots__ = ("_flight", "_given_up", "_task")

    def __init__(self, flight: Flight, can_move: Callable[[], bool] = _always) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self._flight, self._task = flight, task
        self._given_up: BaseException | None = None
        flight.can_move = can_move

    def __repr__(self) -> str:
        return f"<UntilGivenUp {self._flight!r}>"

    def __enter__(self) -> None:
        self._flight.give_up = self._give_up

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._flight.give_up = None
        # the client may have left in the same moment
        if self._given_up is not None and isinstance(error, asyncio.CancelledError) and self._task.uncancel() <= 0:
            raise self._given_up from error

    def _give_up(self, failure: BaseException) -> None:
        if self._given_up is None and self._task.cancel():
            self._given_up = failure

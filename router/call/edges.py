"""The edges of a call: what ends it early, and what its client is told of unplanned exceptions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from policies.errors import DeadlineExceeded, ExpectedError
from policies.quantities import rounded_seconds
from router.call.caller import CallerGone
from router.call.observer import Observer

_log = logging.getLogger("pointsman.pipeline")


def unplanned(error: Exception, observer: Observer) -> ExpectedError:
    """What a client is told of the unplanned `error`: nothing. It is logged whole."""
    _log.error("a request failed by an unplanned exception", exc_info=error)
    observer.event("unplanned_failure")
    return ExpectedError("the router made a mistake", hint="its log says more")


@contextmanager
def outer_edge(observer: Observer) -> Iterator[None]:
    """Raise what is `unplanned` in place of an unplanned exception."""
    try:
        yield
    except (ExpectedError, CallerGone):
        raise
    except Exception as error:
        raise unplanned(error, observer) from error


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise DeadlineExceeded if the body takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            hint = "give the request more time"
            raise DeadlineExceeded(f"the deadline of {rounded_seconds(seconds)} has passed", hint=hint) from error
        raise


async def together(answers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all `answers`; the first failure ends the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(answer)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures

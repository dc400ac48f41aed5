"""The lines that wait for room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from router.batches.line_places import LinePlaces


class WaitingLine(NamedTuple):
    """The call `line` waits, as number `number` of all that ever waited. `places` is None until it was tried.
    `entered` gets the backends to which it may not go."""

    number: int
    line: str
    tenant: str
    model: str
    places: LinePlaces | None
    entered: asyncio.Future[frozenset[str]]

    @property
    def kind(self) -> tuple[str, LinePlaces | None]:
        """Lines of one tenant with the same kind find room together."""
        return self.model, self.places


class LineQueue:
    """Waiting lines: tenants in turn, and the lines of a tenant in their order. A look at all of them takes as long as
    there are kinds, not lines."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, dict[object, OrderedDict[str, WaitingLine]]] = OrderedDict()
        self._numbers, self._count = count(), 0

    def __repr__(self) -> str:
        return f"<LineQueue {self._count} lines of {len(self._tenants)} tenants>"

    def __len__(self) -> int:
        return self._count

    def push(self, line: str, tenant: str, model: str, places: LinePlaces | None) -> WaitingLine:
        """The call `line` waits from now on."""
        entered = asyncio.get_running_loop().create_future()
        waiting = WaitingLine(next(self._numbers), line, tenant, model, places, entered)
        self._tenants.setdefault(tenant, {}).setdefault(waiting.kind, OrderedDict())[line] = waiting
        self._count += 1
        return waiting

    def remove(self, waiting: WaitingLine) -> None:
        """It waits no more; idempotent."""
        kinds = self._tenants.get(waiting.tenant, {})
        lines = kinds.get(waiting.kind)
        if lines is None or lines.pop(waiting.line, None) is None:
            return
        self._count -= 1
        if not lines:
            del kinds[waiting.kind]
        if not kinds:
            del self._tenants[waiting.tenant]

    def is_first(self, waiting: WaitingLine) -> bool:
        """Whether it is the first of its tenant and kind."""
        return next(iter(self._tenants[waiting.tenant][waiting.kind])) == waiting.line

    def first(self) -> Iterator[WaitingLine]:
        """The first line of each tenant and kind."""
        return (next(iter(lines.values())) for kinds in self._tenants.values() for lines in kinds.values())

    def take(self, has_room: Callable[[WaitingLine], bool]) -> WaitingLine | None:
        """Remove the next line that `has_room`, which is asked of the first of each kind; None: there is none."""
        for tenant, kinds in self._tenants.items():
            heads = [next(iter(lines.values())) for lines in kinds.values()]
            if (found := min(filter(has_room, heads), default=None)) is not None:
                self._tenants.move_to_end(tenant)
                self.remove(found)
                return found
        return None

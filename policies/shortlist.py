"""The shortlist: the few backends of a large fleet that are scored for a request. Pure.

The best choice is nearly always a backend that holds much of the prompt or one with little to do. Some backends drawn
at random are added, so that each backend is scored now and then. Source of the idea that a few candidates are nearly as
good as all: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge, nsmallest
from itertools import islice
from typing import NamedTuple

from policies.nouns import BackendView, Capability, Request
from policies.predict import may_fit

LARGE = 64
"""Backends up to which all are scored."""

HOLDERS, IDLEST, OTHERS = 12, 8, 6
"""Backends in a shortlist: the ones that hold most of the prompt, the ones with least to do, and some at random."""


_PER_REQUEST = 3000
"""Waiting tokens that slow a usual prompt there as much as one request does: each request is slowed by it, and slows
its decoding."""


class _Place(NamedTuple):
    """One backend in its group, which is ordered by what its backends have to do, the least first.

    `work` are its waiting tokens and requests per weight, in tokens; `use` is the used part of its limit of requests,
    or requests per weight without a limit. `spare_tokens` is the free room in its KV.
    """

    is_full: bool
    work: float
    use: float
    name: str
    spare_tokens: float


class _Traits(NamedTuple):
    """Properties of backends that decide for good whether they may take a request."""

    pool: str
    models: frozenset[str]
    capabilities: frozenset[Capability]
    context_tokens: int | None


@dataclass(slots=True)
class _Group:
    """Backends with the same traits, in order; `like` is one of them."""

    like: BackendView
    order: list[_Place] = field(default_factory=list)

    def may_take(self, request: Request) -> bool:
        """Whether their traits allow `request` to go to one of them."""
        is_asked = request.pools is None or self.like.pool in request.pools
        is_able = request.model in self.like.models and request.needs <= self.like.capabilities
        return is_asked and is_able and may_fit(request, self.like)


@dataclass(slots=True)
class _Noted:
    view: BackendView
    weight: float
    traits: _Traits
    place: _Place


class Shortlist:
    """Names the candidates for a request, from the last noted view of each backend.

    A noted view may be old: it decides only which backends are scored, by their state at that moment. Backends that
    may not get requests (ill, draining, never reached) are not in it.
    """

    def __init__(self) -> None:
        self._noted: dict[str, _Noted] = {}
        self._groups: dict[_Traits, _Group] = {}

    def __repr__(self) -> str:
        return f"<Shortlist of {len(self)} backends in {len(self._groups)} groups>"

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, view: BackendView, weight: float = 1.0) -> None:
        """Remember what a backend has to do, by its `view`, whatever the request is, and its `weight` in the load."""
        before = self._noted.get(view.name)
        if before is not None and before.view is view and before.weight == weight:
            return
        if not view.healthy or view.draining or not view.models:
            self.forget(view.name)
            return
        traits = _Traits(view.pool, view.models, view.capabilities, view.context_tokens)
        place = _place_of(view, weight)
        if before is not None and before.place == place and before.traits == traits:
            before.view, before.weight = view, weight
            return
        self.forget(view.name)
        group = self._groups.get(traits)
        if group is None:
            group = self._groups[traits] = _Group(view)
        insort(group.order, place)
        self._noted[view.name] = _Noted(view, weight, traits, place)

    def forget(self, name: str) -> None:
        """The backend gets no requests now, or is gone."""
        noted = self._noted.pop(name, None)
        if noted is not None:
            order = self._groups[noted.traits].order
            del order[bisect_left(order, noted.place)]
            if not order:
                del self._groups[noted.traits]

    def names(
        self,
        request: Request,
        held: Mapping[str, int],
        avoiding: Collection[str],
        rng: random.Random,
        *,
        with_full: bool = False,
    ) -> Sequence[str]:
        """The candidates for `request`, without the backends in `avoiding`. `held` has the tokens that backends hold.

        Up to LARGE backends that may take it are all candidates. Of more, the candidates are the ones with room that
        hold most of the prompt, the ones with room that have least to do, and others drawn at random; `with_full` also
        the full ones that hold most.
        """
        groups = {traits: group for traits, group in self._groups.items() if group.may_take(request)}
        count = sum(len(group.order) for group in groups.values())
        if count <= LARGE:
            return [place.name for group in groups.values() for place in group.order if place.name not in avoiding]
        found = dict.fromkeys(self._holders(request, held, groups, avoiding, with_full=with_full))
        idle = (name for name in _idle(request, held, groups.values()) if name not in found and name not in avoiding)
        found |= dict.fromkeys(islice(idle, IDLEST))
        found |= dict.fromkeys(name for name in _drawn(groups.values(), count, rng) if name not in avoiding)
        return list(found)

    def check(self) -> None:
        """Assert that every backend is in one group, at its place."""
        for traits, group in self._groups.items():
            assert group.order == sorted(group.order), f"{self!r}: out of order"
            assert group.order, f"{self!r}: {traits.pool} has an empty group"
        placed = {place.name: place for group in self._groups.values() for place in group.order}
        assert placed == {name: noted.place for name, noted in self._noted.items()}, f"{self!r}: lost a backend"

    def _holders(
        self,
        request: Request,
        held: Mapping[str, int],
        groups: Collection[_Traits],
        avoiding: Collection[str],
        *,
        with_full: bool,
    ) -> list[str]:
        """The ones with room that hold most, and with `with_full` those of all that hold most; among equal ones those
        with least to do.
        """
        any_room: list[tuple[int, _Place]] = []
        room: list[tuple[int, _Place]] = []
        for name in sorted(held, key=held.__getitem__, reverse=True):
            if len(room) >= HOLDERS and -held[name] > room[-1][0]:
                break
            noted = self._noted.get(name)
            if noted is not None and noted.traits in groups and name not in avoiding:
                place = noted.place
                any_room.append((-held[name], place))
                if not place.is_full and place.spare_tokens + held[name] >= request.surely_tokens:
                    room.append(any_room[-1])
        most = nsmallest(HOLDERS, room)
        if with_full:
            most += nsmallest(HOLDERS, any_room)
        return [place.name for _, place in most]


def _place_of(view: BackendView, weight: float) -> _Place:
    there = view.running + view.waiting
    limit = view.adaptive_limit if view.max_requests is None else view.max_requests
    # an idle backend never gets more room than it has
    spare = math.inf if view.free_tokens is None or not there else view.free_tokens
    is_full = limit is not None and there >= limit
    return _Place(
        is_full, (view.waiting_tokens + _PER_REQUEST * there) / weight, there / (limit or 1) / weight, view.name, spare
    )


def _idle(request: Request, held: Mapping[str, int], groups: Iterable[_Group]) -> Iterator[str]:
    """The backends with room, the one with least to do first."""
    for place in merge(*(group.order for group in groups)):
        if place.is_full:
            return
        if place.spare_tokens + held.get(place.name, 0) >= request.surely_tokens:
            yield place.name


def _drawn(groups: Iterable[_Group], count: int, rng: random.Random) -> Iterator[str]:
    """OTHERS of all `count` backends, drawn at random."""
    numbers = rng.sample(range(count), OTHERS)
    for group in groups:
        yield from (group.order[number].name for number in numbers if 0 <= number < len(group.order))
        numbers = [number - len(group.order) for number in numbers]

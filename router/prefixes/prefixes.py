"""Prefixes: computed on some backends before they are asked for, kept there for a time, and made again where they were
lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from policies.errors import ExpectedError, QuotaExceeded, UnknownPrefix
from policies.nouns import Tenant
from policies.prefix.index import PrefixIndex
from router.ask import Ask
from router.cluster import Cluster
from router.prefixes.places import Places
from router.prefixes.prefix import Dropped, Prefix, PrefixNews, prefix_id
from router.prefixes.warmer import Measure, Warmer
from router.supervise import supervise

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """Every `every_s` it is seen whether prefixes are where they should be. A backend that is ill for `patience_s` has
    lost what it had. At most `most_mended` are made again at a time. What could not be is tried after
    `first_backoff_s`, then ever less often.

    Other routers are told of a prefix again every `again_s`, for those that came later, of `most_told` at a time, since
    what waits to be told has little room. One that was dropped is not heard of again for `silent_s`: what was said of
    it before may still be on its way. One router knows of at most `most_known` prefixes, of all tenants and routers.
    """

    every_s: float = 2.0
    patience_s: float = 10.0
    first_backoff_s: float = 5.0
    most_backoff_s: float = 300.0
    most_mended: int = 64
    again_s: float = 30.0
    most_told: int = 1000
    silent_s: float = 10.0
    most_known: int = 10_000


@dataclass(eq=False, slots=True)
class _Charge:
    """A prefix that this router looks after: what to compute, and the task that does so, if one does now.

    `under_way` are the backends that the task tries; `failure` is why it did not get further. `told_at` is when others
    were told of it although nothing had changed.
    """

    ask: Ask
    keys: tuple[int, ...]
    told_at: float
    task: asyncio.Task[None] | None = None
    under_way: set[str] = field(default_factory=set)
    failure: ExpectedError | None = None
    retry_at: float = 0.0
    backoff_s: float = 0.0


class Prefixes:
    """Knows every prefix that is kept, and looks after those that this router was asked for. An async context manager.

    Backends of `cluster` compute them through `warmer` and, those that can, pin them; `index` tells what was lost.
    `by` is this router's name. `now` is Unix time: pins outlive routers.
    """

    def __init__(
        self,
        cluster: Cluster,
        index: PrefixIndex,
        warmer: Warmer,
        *,
        by: str,
        now: Callable[[], float],
        rules: PrefixRules = PrefixRules(),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._places = Places(cluster, index, warmer, now=now, patience_s=rules.patience_s)
        self._warmer, self._by, self._now, self._rules, self._on_failure = warmer, by, now, rules, on_failure
        self._known: dict[_Key, Prefix] = {}
        self._charges: dict[_Key, _Charge] = {}
        self._gone: dict[_Key, float] = {}
        # nothing is to be forgotten before: all are looked through when something is, not with each call and news
        self._next_end = math.inf
        self._errands: set[asyncio.Task[None]] = set()
        self._tell: Callable[[PrefixNews], None] = lambda _: None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Prefixes {len(self._known)} known, {len(self._charges)} looked after here>"

    async def __aenter__(self) -> Prefixes:
        work = supervise("prefixes", self._look_after, on_failure=lambda _: self._on_failure())
        self._task = asyncio.create_task(work, name="prefixes")
        return self

    async def __aexit__(self, *_: object) -> None:
        # what is pinned stays pinned: a router that starts again finds it there
        await _end([self._task, *(charge.task for charge in self._charges.values()), *self._errands])

    def of(self, tenant: str | None = None) -> list[Prefix]:
        """The prefixes of `tenant`, or of all, oldest first."""
        self._forget_old()
        found = [prefix for prefix in self._known.values() if tenant in (None, prefix.tenant)]
        return sorted(found, key=lambda prefix: (prefix.created_at, prefix.key))

    def get(self, tenant: str, id: str) -> Prefix:  # noqa: A002 - it is the prefix's
        """The prefix of `tenant` with this id. Raises UnknownPrefix."""
        self._forget_old()
        prefix = self._known.get((tenant, id))
        if prefix is None:
            hint = "GET /v1/prefixes lists yours"
            raise UnknownPrefix(f"there is no prefix '{id[:80]}', or its time is over", hint=hint, param="id")
        return prefix

    async def keep(self, ask: Ask, tenant: Tenant, *, shards: int, ttl_s: float, waits: bool = True) -> Prefix:
        """The prompt of `ask` is kept on `shards` backends for `ttl_s`; returns when it is there, if it `waits`.

        Whoever asks for a prefix again prolongs it, or has it on more backends. Raises QuotaExceeded, and what
        computing it raises if that went wrong on every backend.
        """
        measure = await self._warmer.measure(ask, tenant)
        key = self._enter(measure, tenant, shards=shards, until=self._now() + ttl_s)
        charge = self._charges.setdefault(key, _Charge(ask, measure.keys, self._now()))
        task = self._begin(key, charge)
        if waits:
            # whoever hangs up leaves it to go on: it is listed, and may be dropped
            await asyncio.wait((task,))
            known = self._known.get(key)
            if charge.failure is not None and (known is None or not known.places):
                # several may wait for it: the first of them drops it
                if self._charges.get(key) is charge:
                    await self.drop(*key)
                raise charge.failure
        return self.get(*key)

    async def drop(self, tenant: str, id: str) -> Prefix:  # noqa: A002 - it is the prefix's
        """Keep this prefix no longer, and let its pins go; what it was. Raises UnknownPrefix."""
        prefix = self.get(tenant, id)
        self._tell(Dropped(tenant, id))
        await self._let_go(prefix)
        return prefix

    async def drop_domain(self, domain: str) -> list[Prefix]:
        """Keep no prefix of cache `domain` any longer; what there was."""
        dropped = [prefix for prefix in self.of() if prefix.domain == domain]
        for prefix in dropped:
            self._tell(Dropped(*prefix.key))
        await asyncio.gather(*map(self._let_go, dropped))
        return dropped

    def share(self, tell: Callable[[PrefixNews], None]) -> None:
        """Call `tell` with what other routers should hear. What it does must be cheap."""
        self._tell = tell

    def hear(self, news: PrefixNews) -> None:
        """Another router told this."""
        self._forget_old()
        key = (news.tenant, news.id)
        known = self._known.get(key)
        if isinstance(news, Dropped):
            self._silence(key)
            if known is not None:
                self._spawn(self._let_go(known))
        elif known is None:
            if news.expires_at > self._now() and len(self._known) < self._rules.most_known and key not in self._gone:
                self._know(news)
        elif known.changed_at < news.changed_at:
            self._know(news)
            if news.by != self._by:
                # whoever was asked last looks after it
                self._leave(key)

    async def turn(self) -> None:
        """Forget what is over, begin to mend what is not as it should be, and tell others again what is kept here."""
        self._forget_old()
        now = self._now()
        room = self._rules.most_mended - sum(charge.task is not None for charge in self._charges.values())
        for key, charge in islice(filter(self._is_broken, self._charges.items()), max(0, room)):
            self._begin(key, charge)
        due = ((key, charge) for key, charge in self._charges.items() if now - charge.told_at >= self._rules.again_s)
        for key, charge in islice(due, self._rules.most_told):
            charge.told_at = now
            self._tell(self._known[key])

    def check(self) -> None:
        """Everything that is looked after is known, and only a task that runs has anything under way."""
        assert self._charges.keys() <= self._known.keys(), f"{self!r}: looks after what it does not know"
        assert len(self._known) <= self._rules.most_known, f"{self!r}: knows too many"
        ends = (prefix.expires_at for prefix in self._known.values())
        assert self._next_end <= min((*ends, *self._gone.values()), default=math.inf), f"{self!r}: forgets too late"
        for key, charge in self._charges.items():
            assert charge.task is None or not charge.task.done(), f"{key} has a task that is over"
            assert charge.task is not None or not charge.under_way, f"{key} is under way without a task"

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._rules.every_s)
            await self.turn()

    def _enter(self, measure: Measure, tenant: Tenant, *, shards: int, until: float) -> _Key:
        """The prefix of `measure`, new or as it was, is to be on so many backends until then. Raises QuotaExceeded."""
        now, id_ = self._now(), prefix_id(measure.keys)
        mine = {prefix.id: prefix for prefix in self.of(tenant.name)}
        known = mine.pop(id_, None)
        if known is None:
            known = Prefix(id_, tenant.name, measure.model, tenant.domain, measure.tokens, 0, now, until)
        wanted = msgspec.structs.replace(
            known, shards=max(shards, known.shards), expires_at=max(until, known.expires_at)
        )
        tokens = wanted.charge + sum(prefix.charge for prefix in mine.values())
        if tokens > tenant.pinned_tokens:
            limit = f"{tenant.pinned_tokens:,}, its limit"
            raise QuotaExceeded(
                f"tenant '{tenant.name}' would keep {tokens:,} tokens of prefixes, more than {limit}",
                hint="DELETE a prefix, keep it on fewer shards, or wait until one is over",
            )
        if wanted.key not in self._known and len(self._known) >= self._rules.most_known:
            raise QuotaExceeded(f"{self._rules.most_known:,} prefixes are kept already", hint="DELETE one")
        self._gone.pop(wanted.key, None)
        self._know(wanted)
        return wanted.key

    def _begin(self, key: _Key, charge: _Charge) -> asyncio.Task[None]:
        """The task that brings the prefix to where it should be; there is one at a time."""
        if charge.task is None:
            charge.failure = None
            self._change(key, is_warming=True, trouble="")
            charge.task = asyncio.create_task(self._mend(key, charge), name=f"prefix {'/'.join(key)}")
        return charge.task

    async def _mend(self, key: _Key, charge: _Charge) -> None:
        until: float | None = None
        try:
            # it may be prolonged, or wanted in more places, while this goes on
            while charge.failure is None and (self._missing(key) or self._known[key].expires_at != until):
                until = self._known[key].expires_at
                await self._renew(key, charge)
                await self._spread(key, charge)
        finally:
            self._ended(key, charge)

    def _ended(self, key: _Key, charge: _Charge) -> None:
        charge.task = None
        charge.under_way.clear()
        if self._charges.get(key) is charge:
            missing, rules = self._missing(key), self._rules
            longer_s = min(max(rules.first_backoff_s, 2 * charge.backoff_s), rules.most_backoff_s)
            charge.backoff_s = longer_s if missing else 0.0
            charge.retry_at = self._now() + charge.backoff_s
            self._change(key, is_warming=False, trouble=str(charge.failure) if missing and charge.failure else "")

    async def _renew(self, key: _Key, charge: _Charge) -> None:
        """Prolong the pins that there are; forget the places that have lost what they had."""
        for place in self._known[key].places:
            kept = await self._places.renewed(place, self._known[key], charge.keys)
            rest = tuple(one for one in self._known[key].places if one.backend != place.backend)
            self._change(key, places=rest if kept is None else (*rest, kept))

    async def _spread(self, key: _Key, charge: _Charge) -> None:
        """Have the prefix computed side by side on as many more backends as it is missing."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._missing(key)):
                placed = asyncio.get_running_loop().create_future()
                task = group.create_task(self._place(key, charge, placed))
                # the next one has to know where this one went
                await asyncio.wait((placed, task), return_when=asyncio.FIRST_COMPLETED)
                if charge.failure is not None:
                    break

    async def _place(self, key: _Key, charge: _Charge, placed: asyncio.Future[None]) -> None:
        """One more backend has the prefix, or `charge.failure` says why not."""

        def note(backend: str) -> None:
            charge.under_way.add(backend)
            if not placed.done():
                placed.set_result(None)

        prefix = self._known[key]
        taken = prefix.backends | charge.under_way
        try:
            place = await self._places.another(prefix, charge.ask, charge.keys, taken=taken, note=note)
        except ExpectedError as failure:
            charge.failure = failure
            return
        if place.backend not in self._known[key].backends:
            self._change(key, places=(*self._known[key].places, place))

    async def _let_go(self, prefix: Prefix) -> None:
        """Forget `prefix` and end its pins."""
        self._known.pop(prefix.key, None)
        self._silence(prefix.key)
        charge = self._charges.pop(prefix.key, None)
        under_way = frozenset[str]()
        if charge is not None:
            under_way = frozenset(charge.under_way)
            await _end([charge.task])
        await self._places.end(prefix, prefix.backends | under_way)

    def _leave(self, key: _Key) -> None:
        """Look after it no longer."""
        charge = self._charges.pop(key, None)
        if charge is not None and charge.task is not None:
            charge.task.cancel()

    def _is_broken(self, entry: tuple[_Key, _Charge]) -> bool:
        """Is it not as it should be, and nobody at it, and is it time to try?"""
        key, charge = entry
        if charge.task is not None or self._now() < charge.retry_at:
            return False
        return self._missing(key) > 0 or not self._places.are_there(self._known[key], charge.keys)

    def _missing(self, key: _Key) -> int:
        prefix = self._known[key]
        return max(0, prefix.shards - len(prefix.places))

    def _change(self, key: _Key, **fields: Any) -> None:
        """The prefix is otherwise now, and the others hear of it: later than whatever they know."""
        known = self._known[key]
        at = max(self._now(), known.changed_at + 0.001)
        self._known[key] = changed = msgspec.structs.replace(known, by=self._by, changed_at=at, **fields)
        self._tell(changed)

    def _know(self, prefix: Prefix) -> None:
        self._known[prefix.key] = prefix
        self._next_end = min(self._next_end, prefix.expires_at)

    def _silence(self, key: _Key) -> None:
        self._gone[key] = until = self._now() + self._rules.silent_s
        self._next_end = min(self._next_end, until)

    def _forget_old(self) -> None:
        now = self._now()
        if now < self._next_end:
            return
        for key in [key for key, prefix in self._known.items() if prefix.expires_at <= now]:
            del self._known[key]
            self._leave(key)
        for key in [key for key, until in self._gone.items() if until <= now]:
            del self._gone[key]
        ends = (prefix.expires_at for prefix in self._known.values())
        self._next_end = min((*ends, *self._gone.values()), default=math.inf)

    def _spawn(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


async def _end(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

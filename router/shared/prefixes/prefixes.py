"""Pinned prefixes: computed on some backends ahead of requests, kept for a time, and computed again where they were
lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any

import msgspec

from policies.errors import BackendFailed, ExpectedError, QuotaExceeded, UnknownPrefix
from policies.nouns import Tenant
from policies.prefix.index import PrefixIndex
from router.ask import Ask
from router.fleet.cluster.cluster import Cluster
from router.shared.prefixes.book import Book
from router.shared.prefixes.places import Places
from router.shared.prefixes.prefix import Dropped, Key, Prefix, PrefixNews, prefix_id
from router.shared.prefixes.rules import PrefixRules
from router.shared.prefixes.tended import Tended, Wish
from router.shared.prefixes.warmer import Measure, Warmer
from router.supervise import supervise

_UNTENDED = "the router that maintained it is gone, and its text with it: POST it again to have it maintained"

_MOST_TROUBLE = 500
"""Most characters of an error that are shown: it may be a backend's whole answer."""


class Prefixes:
    """All pinned prefixes; maintains those that were last requested from this router. An async context manager.

    Backends of `cluster` compute them through `warmer` and pin them if they can; `index` shows evictions.
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
        rules: PrefixRules = PrefixRules(),  # noqa: B008 - frozen
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._places = Places(cluster, index, warmer, now=now, patience_s=rules.patience_s)
        self._warmer, self._by, self._now, self._rules, self._on_failure = warmer, by, now, rules, on_failure
        self._book = Book(now, by, silent_s=rules.silent_s, most=rules.most_known)
        self._charges: dict[Key, Tended] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._tell: Callable[[PrefixNews], None] = lambda _: None
        self._catch_up: Callable[[], Awaitable[None]] = _alone
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Prefixes {len(self._book)} known, {len(self._charges)} maintained here>"

    async def __aenter__(self) -> Prefixes:
        work = supervise("prefixes", self._look_after, on_failure=lambda _: self._on_failure())
        self._task = asyncio.create_task(work, name="prefixes")
        return self

    async def __aexit__(self, *_: object) -> None:
        # pins stay: the router finds them there after a restart
        await _end([self._task, *(charge.task for charge in self._charges.values()), *self._errands])

    def of(self, tenant: str | None = None) -> list[Prefix]:
        """The prefixes of `tenant`, or of all, oldest first."""
        self._forget_old()
        found = [self._as_seen(prefix) for prefix in self._book if tenant in (None, prefix.tenant)]
        return sorted(found, key=lambda prefix: (prefix.created_at, prefix.key))

    def get(self, tenant: str, id: str) -> Prefix:  # noqa: A002 - it is the prefix's
        """The prefix of `tenant` with this id. Raises UnknownPrefix."""
        return self._as_seen(self._found(tenant, id))

    async def keep(self, ask: Ask, tenant: Tenant, *, shards: int, ttl_s: float, waits: bool = True) -> Prefix:
        """Keep the prompt of `ask` on `shards` backends for `ttl_s`; with `waits`, return once it is there.

        Repeating a request prolongs the prefix, or adds backends. Raises QuotaExceeded, and the error of computing it
        if that failed on every backend.
        """
        measure = await self._warmer.measure(ask, tenant)
        await self._catch_up()
        before = self._book.find((tenant.name, prefix_id(measure.keys)))
        key = self._enter(measure, tenant, shards=shards, until=self._now() + ttl_s)
        charge = self._charges.setdefault(key, Tended(ask, measure.keys, self._now()))
        task = self._begin(key, charge)
        if before is not None and before.life != self._book[key].life:
            # its former router ends its own pins; these are ended here in case it is gone
            self._spawn(self._end_after(task, before))
        if waits:
            # a client that disconnects does not stop the task: the prefix is listed, and may be dropped
            await asyncio.wait((task,))
            known = self._book.find(key)
            if charge.failure is not None and (known is None or not known.places):
                # several calls may wait for it: the first one drops it
                if known is not None and self._charges.get(key) is charge:
                    await self._drop(known)
                raise charge.failure
        # the client's next request may go to another router, which must know it by then
        await self._catch_up()
        return self.get(*key)

    async def drop(self, tenant: str, id: str) -> Prefix:  # noqa: A002 - it is the prefix's
        """Unpin this prefix and forget it; returns its last state. Raises UnknownPrefix."""
        await self._catch_up()
        prefix = self._found(tenant, id)
        await self._drop(prefix)
        return prefix

    async def drop_domain(self, domain: str) -> list[Prefix]:
        """Drop all prefixes of cache `domain`; returns their last states."""
        await self._catch_up()
        self._forget_old()
        dropped = [prefix for prefix in self._book if prefix.domain == domain]
        await asyncio.gather(*map(self._drop, dropped))
        return dropped

    async def caught_up(self) -> None:
        """Wait until everything that other routers have written by now was read, if they can be reached."""
        await self._catch_up()

    def share(self, tell: Callable[[PrefixNews], None], catch_up: Callable[[], Awaitable[None]] | None = None) -> None:
        """Call `tell` with news for other routers; it must be cheap.

        `catch_up` returns when all earlier news were written, and all entries written before were read.
        """
        self._tell, self._catch_up = tell, catch_up or _alone

    def hear(self, news: PrefixNews) -> None:
        """Take over news from another router."""
        self._forget_old()
        if isinstance(news, Dropped):
            self._hear_dropped(news)
        elif self._book.accepts(news):
            known = self._book.find(news.key)
            self._book.enter(news)
            if news.by != self._by and known is not None and news.key in self._charges:
                # the router that was asked last maintains it, with pins of its own
                self._spawn(self._let_go(known, self._leave(news.key)))
        elif news.key in self._charges and news.by != self._by:
            self._adopt(news)

    async def turn(self) -> None:
        """Forget expired prefixes, begin to repair broken ones, and repeat this router's prefixes to others."""
        self._forget_old()
        now = self._now()
        room = self._rules.most_mended - sum(charge.task is not None for charge in self._charges.values())
        for key, charge in islice(filter(self._is_broken, self._charges.items()), max(0, room)):
            self._begin(key, charge)
        due = ((key, charge) for key, charge in self._charges.items() if now - charge.sent_at >= self._rules.again_s)
        for key, charge in islice(due, self._rules.most_sent):
            charge.sent_at = now
            self._tell(self._book[key])

    def check(self) -> None:
        """Assert that every maintained prefix is known, and that only a running task has backends under way."""
        self._book.check()
        for key, charge in self._charges.items():
            assert key in self._book, f"{self!r}: maintains an unknown prefix"
            assert charge.task is None or not charge.task.done(), f"{key} has a task that has ended"
            assert charge.task is not None or not charge.under_way, f"{key} has backends under way without a task"

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._rules.every_s)
            await self.turn()

    def _found(self, tenant: str, id: str) -> Prefix:  # noqa: A002 - it is the prefix's
        self._forget_old()
        prefix = self._book.find((tenant, id))
        if prefix is None:
            hint = "GET /v1/prefixes lists yours"
            raise UnknownPrefix(f"there is no prefix '{id[:80]}', or it has expired", hint=hint, param="id")
        return prefix

    def _as_seen(self, prefix: Prefix) -> Prefix:
        """`prefix`, reduced to what is left of it if no router maintains it any more."""
        if prefix.key in self._charges or self._book.silence_s(prefix.key) < self._rules.unmaintained_s:
            return prefix
        return msgspec.structs.replace(prefix, places=self._places.left(prefix), is_warming=False, trouble=_UNTENDED)

    def _enter(self, measure: Measure, tenant: Tenant, *, shards: int, until: float) -> Key:
        """Enter the prefix of `measure` for `shards` backends, or extend it. Raises QuotaExceeded."""
        now, id_ = self._now(), prefix_id(measure.keys)
        mine = {prefix.id: prefix for prefix in self._book if prefix.tenant == tenant.name}
        known, key = mine.pop(id_, None), (tenant.name, id_)
        version = self._book.next_version(key)
        if known is None:
            known = Prefix(id_, tenant.name, measure.model, tenant.domain, measure.tokens, 0, now, until, by=self._by)
        is_taken_over = known.by != self._by or (known.version == 0 and self._book.dropped_at(key) > 0)
        wanted = msgspec.structs.replace(
            known,
            shards=max(shards, known.shards),
            expires_at=max(until, known.expires_at),
            version=version,
            life=version if is_taken_over else known.life,
        )
        tokens = wanted.charge + sum(prefix.charge for prefix in mine.values())
        if tokens > tenant.pinned_tokens:
            limit = f"{tenant.pinned_tokens:,}, its limit"
            raise QuotaExceeded(
                f"tenant '{tenant.name}' would keep {tokens:,} tokens of prefixes, more than {limit}",
                hint="DELETE a prefix, keep it on fewer shards, or wait until one expires",
            )
        if key not in self._book and self._book.is_full:
            raise QuotaExceeded(f"{self._rules.most_known:,} prefixes are kept already", hint="DELETE one")
        self._book.enter(wanted)
        return key

    def _begin(self, key: Key, charge: Tended) -> asyncio.Task[None]:
        """The task that brings the prefix to its wanted state; there is one at a time."""
        if charge.task is None:
            charge.failure = None
            self._change(key, is_warming=True, trouble="")
            charge.task = asyncio.create_task(self._mend(key, charge), name=f"prefix {'/'.join(key)}")
        return charge.task

    async def _mend(self, key: Key, charge: Tended) -> None:
        tried: Wish | None = None
        try:
            # meanwhile it may be prolonged, wanted on more backends, or get new pins
            while charge.failure is None and (self._missing(key) or self._wish(key) != tried):
                tried = self._wish(key)
                charge.pinned = tried if await self._renew(key, charge) else None
                await self._spread(key, charge)
        finally:
            self._ended(key, charge)

    def _wish(self, key: Key) -> Wish:
        return (self._book[key].expires_at, self._book[key].life)

    def _ended(self, key: Key, charge: Tended) -> None:
        charge.task = None
        charge.under_way.clear()
        if self._charges.get(key) is charge:
            missing, rules = self._missing(key), self._rules
            longer_s = min(max(rules.first_backoff_s, 2 * charge.backoff_s), rules.most_backoff_s)
            charge.backoff_s = longer_s if missing or charge.pinned != self._wish(key) else 0.0
            charge.retry_at = self._now() + charge.backoff_s
            trouble = charge.failure.public_message[:_MOST_TROUBLE] if missing and charge.failure else ""
            self._change(key, is_warming=False, trouble=trouble)

    async def _renew(self, key: Key, charge: Tended) -> bool:
        """Prolong existing pins, and remove places that have lost them. Returns whether each backend was reached."""
        were_reached = True
        for place in self._book[key].places:
            try:
                kept = await self._places.renewed(place, self._book[key], charge.keys)
            except BackendFailed:
                # ill for a short time only: it may come back with its blocks, and then its pin must be prolonged
                were_reached = False
                continue
            rest = tuple(each for each in self._book[key].places if each.backend != place.backend)
            self._change(key, places=rest if kept is None else (*rest, kept))
        return were_reached

    async def _spread(self, key: Key, charge: Tended) -> None:
        """Compute the prefix on as many more backends as are missing, in parallel."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._missing(key)):
                placed = asyncio.get_running_loop().create_future()
                task = group.create_task(self._place(key, charge, placed))
                # the next attempt must know the backend of this one
                await asyncio.wait((placed, task), return_when=asyncio.FIRST_COMPLETED)
                if charge.failure is not None:
                    break

    async def _place(self, key: Key, charge: Tended, placed: asyncio.Future[None]) -> None:
        """Add one backend with the prefix, or set `charge.failure` to the reason why not."""

        def note(backend: str) -> None:
            charge.under_way.add(backend)
            if not placed.done():
                placed.set_result(None)

        prefix = self._book[key]
        taken = prefix.backends | charge.under_way
        try:
            place = await self._places.another(prefix, charge.ask, charge.keys, taken=taken, note=note)
        except ExpectedError as failure:
            charge.failure = failure
            return
        if prefix.life != self._book[key].life:
            # the next round pins it under the new name
            self._spawn(self._places.end(prefix, (place.backend,)))
        if place.backend not in self._book[key].backends:
            self._change(key, places=(*self._book[key].places, place))

    def _hear_dropped(self, news: Dropped) -> None:
        key, known = news.key, self._book.find(news.key)
        version = news.version or self._book.next_version(key)
        if known is None or known.version > version:
            self._book.note_dropped(key, version)
            if known is not None and known.life <= version and key in self._charges:
                self._live_again(known, self._charges[key])
            return
        if key in self._charges:
            # correct late readers of this router's earlier news
            self._tell(Dropped(*key, version))
        self._spawn(self._struck(known, version))

    def _live_again(self, known: Prefix, charge: Tended) -> None:
        """Pin it under a new name: another router, asked earlier, may still be ending pins of the old one."""
        self._change(known.key, life=known.version)
        self._spawn(self._places.end(known, known.backends))
        self._begin(known.key, charge)

    def _adopt(self, news: Prefix) -> None:
        """Another router was asked for it before it knew of this one's: keep the larger of both wishes."""
        known, charge = self._book[news.key], self._charges[news.key]
        if news.version <= self._book.dropped_at(news.key):
            return
        expires_at, shards = max(known.expires_at, news.expires_at), max(known.shards, news.shards)
        if (expires_at, shards) != (known.expires_at, known.shards):
            self._change(news.key, expires_at=expires_at, shards=shards)
            self._begin(news.key, charge)
        if known.life < news.version:
            # the other router ends the pins that it found, or its own, which may have the same name
            self._live_again(self._book[news.key], charge)

    async def _drop(self, prefix: Prefix) -> None:
        version = self._book.next_version(prefix.key)
        self._tell(Dropped(*prefix.key, version))
        await asyncio.gather(self._struck(prefix, version), self._catch_up())

    def _struck(self, prefix: Prefix, version: int) -> Coroutine[Any, Any, None]:
        """Forget `prefix`; the returned coroutine ends its pins."""
        self._book.drop(prefix.key, version)
        return self._let_go(prefix, self._leave(prefix.key))

    def _let_go(self, prefix: Prefix, charge: Tended | None) -> Coroutine[Any, Any, None]:
        """Ends the pins of `prefix`, also at the backends that are being tried at this moment."""
        if charge is None:
            return self._places.end(prefix, prefix.backends)
        return self._ended_first(charge.task, prefix, prefix.backends | charge.under_way)

    async def _ended_first(self, task: asyncio.Task[None] | None, prefix: Prefix, backends: frozenset[str]) -> None:
        await _end([task])
        await self._places.end(prefix, backends)

    async def _end_after(self, task: asyncio.Task[None], before: Prefix) -> None:
        await asyncio.wait((task,))
        await self._places.end(before, before.backends)

    def _leave(self, key: Key) -> Tended | None:
        """Stop maintaining it; returns its task and wishes, if any."""
        charge = self._charges.pop(key, None)
        if charge is not None and charge.task is not None:
            charge.task.cancel()
        return charge

    def _is_broken(self, entry: tuple[Key, Tended]) -> bool:
        """Whether it needs repair now: something is missing, no task runs, and the backoff has passed."""
        key, charge = entry
        if charge.task is not None or self._now() < charge.retry_at:
            return False
        if self._missing(key) or charge.pinned != self._wish(key):
            return True
        return not self._places.are_there(self._book[key], charge.keys)

    def _missing(self, key: Key) -> int:
        prefix = self._book[key]
        return max(0, prefix.shards - len(prefix.places))

    def _change(self, key: Key, **fields: Any) -> None:
        """Change the prefix and send it to the others, with a later time than any known one."""
        known = self._book[key]
        at = max(self._now(), known.changed_at + 0.001)
        changed = msgspec.structs.replace(known, by=self._by, changed_at=at, **fields)
        self._book.enter(changed)
        self._tell(changed)

    def _forget_old(self) -> None:
        for key in self._book.forget_old():
            self._leave(key)

    def _spawn(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


async def _alone() -> None:
    """There are no other routers to wait for."""


async def _end(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

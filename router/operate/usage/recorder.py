"""The recorder sums what each call used: within 50 ms it is in the journal, and within a second in the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from policies.errors import ConfigError
from policies.nouns import NO_TENANT, Decision, Outcome, Request
from router.call.observer import Account
from router.operate.usage.journal import Journal, orphans
from router.operate.usage.rows import (
    AT_OUTCOME,
    COST,
    HOUR_S,
    MOST_USER,
    USED,
    Rows,
    UsageKey,
    add,
    cleaned,
    row_of,
)
from router.private_files import NO_ROOM

if TYPE_CHECKING:
    # a router that keeps no usage runs without SQLAlchemy
    from router.operate.usage.database import UsageDatabase

JOURNAL_S = 0.05
"""Most time that passes before what a call used is in the journal."""

DATABASE_S = 1.0
"""Time between two transactions."""

MOST_JOURNAL_BYTES = 8 * 2**20
"""A longer journal is written anew, with its batches added up."""

_PATIENCE_S = 5.0
_MUTE_S, _LAST_S = 10.0, 2.0
"""A database that has said nothing for so long counts as away, and is no longer waited for at the end."""

_AWAY_S = (1.0, 30.0)

_T = TypeVar("_T")

_log = logging.getLogger("pointsman.usage")


class UsageRecorder:
    """A telemetry listener. `kind_of` gives the kind of a pool's backends, `currency` that of the prices in force.

    `open` starts a thread, which alone touches the `journal` folder and the `database`; `close` waits until it has
    written everything, at most five seconds. Where the database is away, the journal keeps what was used, and
    `on_event` gets `usage_store_away` and `usage_store_back`. Rows older than `keep_s` are deleted.
    """

    def __init__(
        self,
        database: UsageDatabase,
        journal: Path,
        *,
        kind_of: Callable[[str], str],
        currency: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        on_event: Callable[[str], None] = lambda _: None,
        keep_s: float | None = None,
    ) -> None:
        self.database, self._folder = database, journal
        self._kind_of, self._currency, self._clock, self._unix_time = kind_of, currency, clock, unix_time
        self._on_event, self._keep_s = on_event, keep_s
        self._lock = threading.Lock()
        self._new: Rows = {}
        self._wake, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        # of the thread
        self._journal: Journal | None = None
        self._unwritten: Rows = {}
        self._waiting: Rows = {}
        self._tried: tuple[int, Rows] | None = None
        self._is_away = self._is_stuck = False
        self._forgotten_at = 0.0
        self._synced = threading.Condition()
        self._rounds = self._asked = 0

    def __repr__(self) -> str:
        return f"<UsageRecorder {self._folder} {self.database}{', away' if self._is_away else ''}>"

    def decided(self, request: Request, decision: Decision, at: float) -> None:
        """Nothing is done here."""

    def missed(self, service_class: str, step: str) -> None:
        """Nothing is done here."""

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:  # noqa: ARG002 - as any listener
        # a request belongs to the hour in which it began, as it does to the budget of that hour
        began = self._unix_time() - (self._clock() - account.started_at)
        hour = int(began) // HOUR_S * HOUR_S
        user, currency = (account.user or "")[:MOST_USER], self._currency() or ""
        key = UsageKey(
            hour,
            "" if account.tenant == NO_TENANT else account.tenant,
            account.team or "",
            account.key or "",
            user,
            account.model,
            account.service_class,
            pool="",
            kind="",
            currency=currency,
            tags=",".join(account.tags),
        )
        with self._lock:
            if not account.spent:
                row_of(self._new, key)[AT_OUTCOME[outcome]] += 1
            for number, spent in enumerate(account.spent):
                at_pool = key._replace(model=spent.model, pool=spent.pool, kind=self._kind_of(spent.pool))
                row = row_of(self._new, at_pool)
                row[AT_OUTCOME[outcome]] += number == 0
                usage = spent.usage
                for at, name in enumerate(USED, len(AT_OUTCOME)):
                    row[at] += getattr(usage, name)
                row[COST] += spent.cost
        self._wake.set()

    def open(self) -> None:
        """Open the journal and start the thread. Raises ConfigError, also if the database can never be used; one that
        is away now may come back, and a disk that is full may get room. Blocks."""
        try:
            self.database.migrate()
        except ConnectionError as error:
            if self.database.is_file and error.errno not in NO_ROOM:
                raise ConfigError(
                    f"usage cannot be kept: {error}", hint="name another file with usage.store"
                ) from error
            self._lost(error)
        try:
            self._journal = Journal(self._folder)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._stuck(self._folder, error)
                self._thread.start()
                return
            hint = "name another folder with usage.journal"
            reason = error.strerror or error
            raise ConfigError(f"the journal of usage {self._folder} cannot be written: {reason}", hint=hint) from error
        self._thread.start()

    def close(self) -> None:
        """Write what is left, within five seconds, and end the thread. Blocks."""
        self._is_over.set()
        self._wake.set()
        self._thread.join(_PATIENCE_S)

    def sync(self, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until the database has what was used until now; False if it is away or that takes too long. Blocks."""
        with self._synced:
            self._asked = wanted = self._rounds + 2
            self._wake.set()
            done = self._synced.wait_for(lambda: self._rounds >= wanted or self._is_away, patience_s)
            return done and not self._is_away

    def _run(self) -> None:
        journal = self._journal = self._journal or self._opened_later()
        if journal is None:
            self.database.close()
            return
        retry_s, due = _AWAY_S[0], 0.0
        self._asked = 1
        while True:
            if self._asked <= self._rounds:
                self._wake.wait(max(0.0, due - time.monotonic()) if self._has_more() else DATABASE_S)
            is_last = self._is_over.is_set()
            # more calls end in a moment, and are one write with this one
            if not is_last and self._asked <= self._rounds:
                self._is_over.wait(JOURNAL_S)
            self._wake.clear()
            self._put_into(journal)
            if is_last or self._asked > self._rounds or time.monotonic() >= due:
                is_done = self._put_into_database(journal)
                retry_s = _AWAY_S[0] if is_done else min(2 * retry_s, _AWAY_S[1])
                due = time.monotonic() + (DATABASE_S if is_done else retry_s)
                with self._synced:
                    self._rounds += 1
                    self._synced.notify_all()
            if is_last:
                break
        journal.close(is_done=not self._has_more())
        self.database.close()

    def _opened_later(self) -> Journal | None:
        """The journal, once its disk has room; None if the router ends before."""
        while not self._is_over.wait(_AWAY_S[0]):
            with suppress(OSError):
                return Journal(self._folder)
        return None

    def _stuck(self, path: Path, error: OSError) -> None:
        if not self._is_stuck:
            _log.warning("the journal %s cannot be written: %s", path, error)
            self._on_event("usage_journal_failed")
        self._is_stuck = True

    def _has_more(self) -> bool:
        return bool(self._unwritten or self._waiting or self._tried)

    def _put_into(self, journal: Journal) -> None:
        """Append what is new to the journal, or keep it for the next time if that fails."""
        with self._lock:
            new, self._new = self._new, {}
        add(self._unwritten, cleaned(new))
        if not self._unwritten:
            return
        try:
            journal.append(self._unwritten)
            add(self._waiting, self._unwritten)
            self._unwritten = {}
            if journal.size > max(MOST_JOURNAL_BYTES, 2 * journal.rewritten_bytes):
                journal.rewrite([*([self._tried] if self._tried else []), (journal.seq, self._waiting)])
            self._is_stuck = False
        except OSError as error:
            self._stuck(journal.path, error)

    def _ask(self, journal: Journal, call: Callable[[], _T]) -> _T:
        """The result of a call to the database. The journal goes on meanwhile: a database that stops in the middle of
        an answer keeps its connection, and no option of its client bounds that. Raises ConnectionError at the end of
        the router, and the call's own errors."""
        answer = Future[_T]()
        threading.Thread(target=_answer, args=(call, answer), name="usage database", daemon=True).start()
        began = time.monotonic()
        while True:
            wait([answer], timeout=JOURNAL_S)
            if answer.done():
                return answer.result()
            self._put_into(journal)
            mute_s = time.monotonic() - began
            if mute_s > _MUTE_S and not self._is_away:
                self._lost(ConnectionError(f"{self.database} has not answered for {mute_s:.0f} s"))
            if mute_s > _LAST_S and self._is_over.is_set():
                raise ConnectionError(f"{self.database} does not answer")

    def _put_into_database(self, journal: Journal) -> bool:
        """Have everything that the journal has added to the database; whether that is done."""
        try:
            if not self._rounds or self._is_away:
                self._ask(journal, self.database.migrate)
                self._take_over(journal)
            # what was tried once is tried again as it was: the database may have it
            for _ in range(2):
                if self._tried is None and self._waiting:
                    self._tried, self._waiting = (journal.seq, self._waiting), {}
                if self._tried is not None:
                    seq, rows = self._tried
                    self._ask(journal, partial(self.database.add, journal.writer, seq, rows, now=self._unix_time()))
                    self._tried = None
            # what came meanwhile is in the journal alone
            if not self._waiting and journal.size > MOST_JOURNAL_BYTES // 8:
                journal.rewrite([])
            self._forget(journal)
        except (ConnectionError, ConfigError, OSError) as error:
            self._lost(error)
            return False
        except Exception as error:  # noqa: BLE001 - as said below
            # the thread goes on, and the journal has what was used
            _log.exception("usage could not be put into the database")
            self._lost(error)
            return False
        if self._is_away:
            _log.info("usage is in the database again")
            self._on_event("usage_store_back")
        self._is_away = False
        return True

    def _lost(self, error: Exception) -> None:
        if not self._is_away:
            _log.warning("usage waits in %s: %s", self._folder, error)
            self._on_event("usage_store_away")
        self._is_away = True

    def _take_over(self, journal: Journal) -> None:
        """Add what routers left behind that were killed."""
        for orphan in orphans(self._folder):
            try:
                seq, rows = orphan.after(self._ask(journal, partial(self.database.last, orphan.writer)))
                if rows:
                    self._ask(journal, partial(self.database.add, orphan.writer, seq, rows, now=self._unix_time()))
            except ConnectionError:
                orphan.release()
                raise
            orphan.remove()

    def _forget(self, journal: Journal) -> None:
        now = self._unix_time()
        if self._keep_s is not None and now - self._forgotten_at > HOUR_S:
            self._ask(journal, partial(self.database.forget, now - self._keep_s))
            self._forgotten_at = now


def _answer(call: Callable[[], _T], answer: Future[_T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
        answer.set_exception(error)

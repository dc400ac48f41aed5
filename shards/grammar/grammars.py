"""Grammars of requests: compiled on a thread of their own, and cached for later requests."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

from shards.grammar.compiler import CannotCompile, Compiled, Compiler
from shards.nouns import Grammar

Outcome = Compiled | CannotCompile


class Grammars:
    """The results of the last `capacity` grammars, failed ones included, and the requests that wait for one.

    All calls come from one thread, and none of them blocks. One grammar is compiled at a time, so that a shard's steps
    lose at most one core. Domains take turns, and at most `most_of_one` grammars of a domain wait. Without a `compiler`
    no grammar can be compiled.
    """

    def __init__(self, compiler: Compiler | None, *, capacity: int = 128, most_of_one: int = 32) -> None:
        self._compiler, self._capacity, self._most_of_one = compiler, capacity, most_of_one
        self._known: OrderedDict[Grammar, Future[Outcome]] = OrderedDict()
        self._awaited: dict[Hashable, Future[Outcome]] = {}
        # by domain, the one with the next turn first; the lock is for both threads
        self._turns: OrderedDict[str, deque[tuple[Grammar, Future[Outcome]]]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def __repr__(self) -> str:
        return f"Grammars({len(self._known)} of {self._capacity} known, {len(self._awaited)} awaited)"

    @property
    def can_compile(self) -> bool:
        """Whether there is a compiler."""
        return self._compiler is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._awaited)

    def ask(self, key: Hashable, grammar: Grammar, *, domain: str = "") -> bool:
        """Compile `grammar` for the request `key` of `domain`, unless cached; False if too many others wait."""
        known = self._known.get(grammar)
        if known is None:
            if len(self._known) >= self._capacity and not self._forget_oldest():
                return False
            known = self._enqueue(grammar, domain)
            if known is None:
                return False
            self._known[grammar] = known
        self._known.move_to_end(grammar)
        self._awaited[key] = known
        return True

    def answers(self) -> list[tuple[Hashable, Outcome]]:
        """The results that arrived since the last call, one for each waiting request."""
        landed = [(key, outcome) for key, outcome in self._awaited.items() if outcome.done()]
        for key, _ in landed:
            del self._awaited[key]
        return [(key, outcome.result()) for key, outcome in landed]

    def leave(self, key: Hashable) -> None:
        """Forget the request `key`, which no longer waits."""
        self._awaited.pop(key, None)

    def close(self) -> None:
        """Compile no further grammars."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _forget_oldest(self) -> bool:
        oldest = next((grammar for grammar, outcome in self._known.items() if outcome.done()), None)
        if oldest is not None:
            del self._known[oldest]
        return oldest is not None

    def _enqueue(self, grammar: Grammar, domain: str) -> Future[Outcome] | None:
        """What `grammar` will become; None if `domain` has too many that wait."""
        outcome = Future[Outcome]()
        with self._lock:
            waiting = self._turns.setdefault(domain, deque())
            if len(waiting) >= self._most_of_one:
                return None
            waiting.append((grammar, outcome))
        self._thread.submit(self._compile_next)
        return outcome

    def _compile_next(self) -> None:
        with self._lock:
            domain, waiting = self._turns.popitem(last=False)
            grammar, outcome = waiting.popleft()
            if waiting:
                self._turns[domain] = waiting
        assert self._compiler is not None, "nothing can be compiled without a compiler"
        try:
            outcome.set_result(self._compiler.compile(grammar))
        except CannotCompile as refusal:
            outcome.set_result(refusal)
        except BaseException as error:
            outcome.set_exception(error)
            raise

"""Grammars of requests: compiled on a thread of their own, and cached for later requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

from shards.grammar.compiler import CannotCompile, Compiled, Compiler
from shards.nouns import Grammar

Outcome = Compiled | CannotCompile


class Grammars:
    """The results of the last `capacity` grammars, failed ones included, and the requests that wait for one.

    All calls come from one thread, and none of them blocks. One grammar is compiled at a time, so that a shard's steps
    lose at most one core. Without a `compiler` no grammar can be compiled.
    """

    def __init__(self, compiler: Compiler | None, *, capacity: int = 128) -> None:
        self._compiler, self._capacity = compiler, capacity
        self._known: OrderedDict[Grammar, Future[Outcome]] = OrderedDict()
        self._awaited: dict[Hashable, Future[Outcome]] = {}
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

    def ask(self, key: Hashable, grammar: Grammar) -> bool:
        """Compile `grammar` for the request `key`, unless cached; False if too many others are being compiled."""
        known = self._known.get(grammar)
        if known is None:
            if len(self._known) >= self._capacity and not self._forget_oldest():
                return False
            known = self._known[grammar] = self._thread.submit(self._compile, grammar)
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

    def _forget_oldest(self) -> bool:
        oldest = next((grammar for grammar, outcome in self._known.items() if outcome.done()), None)
        if oldest is not None:
            del self._known[oldest]
        return oldest is not None

    def _compile(self, grammar: Grammar) -> Outcome:
        assert self._compiler is not None, "nothing can be compiled without a compiler"
        try:
            return self._compiler.compile(grammar)
        except CannotCompile as refusal:
            return refusal

"""The process in which grammars are tried before they are compiled in this one: started, watched, and replaced."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress

import msgspec

from shards.grammar.library import MOST_CHARACTERS, CannotCompile, Setting
from shards.grammar.trial import GrammarTrial, TrialResult
from shards.nouns import Grammar
from shards.parallel.link import LinkBroken, PartLink

MOST_S = 30.0
"""A trial is bounded in CPU time. On a machine that gives it none it is given up after this, with its process."""


class Trials:
    """Tries grammars for `setting`, one at a time, from one thread. The process starts with the first one."""

    def __init__(self, setting: Setting, *, most_s: float = MOST_S) -> None:
        self._setting, self._most_s = setting, most_s
        self._running: _Running | None = None
        self._lock, self._is_closed = threading.Lock(), False

    def __repr__(self) -> str:
        return f"Trials({self._running!r})"

    @property
    def pid(self) -> int | None:
        """The number of the process; None before the first trial."""
        return None if self._running is None else self._running.process.pid

    def rules_of(self, grammar: Grammar) -> str:
        """`grammar` in the library's notation, if it can be compiled and begun. Raises CannotCompile."""
        if len(grammar.text) > MOST_CHARACTERS:
            raise CannotCompile(f"it has {len(grammar.text)} characters; at most {MOST_CHARACTERS} are read")
        asked = msgspec.msgpack.encode(GrammarTrial(grammar.form, grammar.text))
        # a process that ended while it was idle is not the grammar's fault
        answer = self._ask(asked) or self._ask(asked)
        if answer is None:
            raise CannotCompile("the process that was to compile it ended, or gave no answer in time")
        verdict = msgspec.msgpack.decode(answer, type=TrialResult)
        if verdict.refusal:
            raise CannotCompile(verdict.refusal)
        return verdict.rules

    def close(self) -> None:
        """End the process; none starts any more."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.end()

    def _ask(self, question: bytes) -> bytes | None:
        """The answer to `question`; None, and no process, if there is none in time."""
        with self._lock:
            if self._is_closed:
                return None
            if self._running is None:
                self._running = _Running(self._setting, self._most_s)
            running = self._running
        try:
            running.link.send(question)
            answer = running.link.receive()
        except LinkBroken:
            answer = None
        if answer is None:
            with self._lock:
                running.end()
                self._running = None
        return answer


class _Running:
    """A running process, which ends with this object."""

    def __init__(self, setting: Setting, most_s: float) -> None:
        own, theirs = socket.socketpair()
        seconds, rest = divmod(most_s, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        self.link = PartLink(own, waits_s=most_s)
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - this program itself, without a shell # nosec B603
                (sys.executable, "-P", "-m", "shards.grammar", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # with the trials that it forks it is a group, which can be ended
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, self.process, self.link)
        with suppress(LinkBroken):  # it has ended: the first question shows that
            self.link.send(msgspec.msgpack.encode(setting))

    def __repr__(self) -> str:
        return f"<process {self.process.pid}>"


def _end(process: subprocess.Popen[bytes], link: PartLink) -> None:
    link.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

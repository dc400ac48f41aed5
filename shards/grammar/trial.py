"""Trials of grammars, each in a process of its own: the library may crash, hang, or take all memory there.

The first process reads the tokenizer and forks for each grammar. It has one thread, which is what makes forking safe.
Torch-free.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

from shards.grammar.library import CannotCompile, Library, Setting, rules_of
from shards.nouns import Grammar, GrammarForm
from shards.parallel.link import PartLink

MOST_CPU_S = 4
"""CPU time of a trial, and so about that of compiling the grammar."""

MOST_BYTES = 512 << 20
"""Memory of a trial beside the tokenizer."""

STACK_BYTES = 1 << 20
"""Stack of a trial. Threads have at least twice that, so a grammar that passes does not overflow theirs."""

_PIECE_BYTES = 1 << 16

_ENDS = {
    signal.SIGSEGV: "it nests too deeply, or chains too many rules",
    signal.SIGBUS: "it nests too deeply, or chains too many rules",
    signal.SIGXCPU: f"compiling it takes more than {MOST_CPU_S} s",
    signal.SIGKILL: f"compiling it takes more than {MOST_CPU_S} s",
    signal.SIGABRT: f"compiling it takes more than {MOST_BYTES >> 20} MiB, or fails",
}


class GrammarTrial(msgspec.Struct, frozen=True):
    """A grammar; without a `form`, one that this program does not know."""

    form: GrammarForm | None
    text: str


class TrialResult(msgspec.Struct, frozen=True):
    """A grammar that can be compiled, as `rules` in the library's notation, or why it cannot."""

    rules: str = ""
    refusal: str = ""


def serve(link: PartLink) -> None:
    """Read the Setting, then answer each GrammarTrial with its TrialResult, until the other end closes `link`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setting = link.receive()
    if setting is None:
        return
    library = Library(msgspec.msgpack.decode(setting, type=Setting))
    while (question := link.receive()) is not None:
        link.send(_apart(library, question))


def _apart(library: Library, question: bytes) -> bytes:
    """The TrialResult on `question`, by a process of its own."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            _limit()
            _write(writes, msgspec.msgpack.encode(_try(library, question)))
        finally:
            # whatever was raised: this process must not go on as the first one
            os._exit(0)
    os.close(writes)
    pieces = list[bytes]()
    while piece := os.read(reads, _PIECE_BYTES):
        pieces.append(piece)
    os.close(reads)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and pieces:
        return b"".join(pieces)
    end = _ENDS.get(signal.Signals(os.WTERMSIG(status))) if os.WIFSIGNALED(status) else None
    return msgspec.msgpack.encode(TrialResult(refusal=end or _ENDS[signal.SIGABRT]))


def _try(library: Library, question: bytes) -> TrialResult:
    asked = msgspec.msgpack.decode(question, type=GrammarTrial)
    try:
        rules = rules_of(Grammar(asked.form, asked.text))
        matcher = library.matcher(rules).deep_copy()
    except CannotCompile as refusal:
        return TrialResult(refusal=str(refusal))
    matcher.compute_bitmask()
    if matcher.is_error():
        return TrialResult(refusal=_why_it_cannot_begin(matcher.get_error()))
    return TrialResult(rules)


def _why_it_cannot_begin(error: str) -> str:
    reason = error.partition("\n")[0]
    return "no answer fits it" if "NoExtension" in reason else f"it is too complex to begin: {reason}"


def _limit() -> None:
    """Limits for this process. They are below those that the operator may have set."""
    lower(resource.RLIMIT_STACK, STACK_BYTES)
    lower(resource.RLIMIT_CPU, MOST_CPU_S)
    with suppress(OSError):  # there is no /proc: then time bounds memory too
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MOST_BYTES)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # the library describes a crash at length
    os.dup2(nowhere, 2)


def lower(which: int, limit: int) -> None:
    """Set the soft limit `which` of this process to `limit`, or leave a lower one."""
    soft, hard = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(which, (limit, hard))


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]

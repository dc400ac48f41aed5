"""Generators of requests: chats, documents, agents and others, scaled to a share of a fleet's capacity.

A workload is a list of sessions. The requests of a session come at fixed distances, whatever the load is; the sessions
begin at random, and the shorter the time in which all of them begin, the higher is the load.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from simulation.arrivals import CHUNK_TOKENS, Arrival
from simulation.changes import Change, Joining, Slowdown
from simulation.speed import Machine

BATCH = "batch"
"""The priority of requests that no person waits for."""

FLOORED = "floored"
"""The priority of requests of a class that is served after others, but has a floor."""


class SessionRequest(NamedTuple):
    """One request, `after_s` seconds after its session began. `chunks` name the beginning of its prompt."""

    after_s: float
    prompt_tokens: int
    new_tokens: int
    chunks: tuple[int, ...] = ()
    priority: str | None = None


Session = tuple[SessionRequest, ...]

Draw = Callable[[random.Random, int], list[Session]]
"""Sessions with so many requests in all, or a few more."""

Begin = Callable[[random.Random, int], list[float]]
"""When so many sessions begin, as shares of the whole time."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of load. `meaning` describes it in one sentence; `requests` is the number of them in one run.

    `speeds` are those of the backends, relative to the usual machine; the last `first_come` of them serve first come,
    first served. `changes` happens to them, at shares of the whole time.
    """

    name: str
    meaning: str
    draw: Draw
    begin: Begin
    requests: int = 300
    speeds: tuple[float, ...] = (1.0,) * 8
    first_come: int = 0
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaledLoad:
    """The requests of a workload at one load, with what they would find in an infinite cache.

    `cached` has the prompt tokens of each arrival that an earlier one had, and `changes` the backends' changes in
    seconds.
    """

    arrivals: tuple[Arrival, ...]
    cached: tuple[int, ...]
    changes: tuple[Change, ...]


def load_of(workload: Workload, machines: Sequence[Machine], *, share: float, seed: int) -> ScaledLoad:
    """The requests of `workload` at `share` of the capacity of `machines`. Equal arguments give equal requests.

    The capacity is that of machines which share the work perfectly, with an infinite cache for all of them: more than
    any router reaches. Sessions begin until this share of it is used up; long ones go on after that.
    """
    rng = random.Random(f"{workload.name} {seed}")
    sessions = workload.draw(rng, workload.requests)
    shares = workload.begin(rng, len(sessions))
    turns = [turn for session in sessions for turn in session]
    span_s = 1.0 / (share * sum(1.0 / work_s(turns, machine) for machine in machines))
    starts = [at * span_s for at in shares]
    timed = sorted(
        (
            (start + turn.after_s, f"session {number}", turn)
            for number, (start, session) in enumerate(zip(starts, sessions, strict=True))
            for turn in session
        ),
        key=lambda timed_turn: timed_turn[0],
    )
    arrivals = tuple(
        Arrival(
            number,
            round(at_s, 6),
            turn.prompt_tokens,
            turn.new_tokens,
            chunks=turn.chunks,
            priority=turn.priority,
            session=session_name,
        )
        for number, (at_s, session_name, turn) in enumerate(timed)
    )
    changes = tuple(replace(change, at_s=change.at_s * span_s) for change in workload.changes)
    return ScaledLoad(arrivals, tuple(held_before(arrivals)), changes)


def held_before(requests: Sequence[SessionRequest | Arrival]) -> Iterator[int]:
    """For each request the tokens of its prompt that an earlier request began with: the hits of one infinite cache."""
    # each known beginning by the number of the one before it and the name of its last chunk
    known: dict[tuple[int, int], int] = {}
    for request in requests:
        before, chunks = 0, 0
        is_held = True
        for name in request.chunks[: request.prompt_tokens // CHUNK_TOKENS]:
            is_held = is_held and (before, name) in known
            chunks += is_held
            before = known.setdefault((before, name), len(known) + 1)
        yield min(request.prompt_tokens - 1, chunks * CHUNK_TOKENS)


def work_s(turns: Sequence[SessionRequest], machine: Machine) -> float:
    """Seconds that `machine` needs for all `turns` at least, with an infinite cache and as many as fit in each step."""
    speed = machine.speed
    steps_s = prompts_s = 0.0
    drawn = 0
    for turn, cached in zip(turns, held_before(turns), strict=True):
        fresh = turn.prompt_tokens - cached
        prompts_s += fresh * (speed.token_s + speed.pair_s * (cached + fresh / 2))
        steps_s += turn.new_tokens * (speed.sequence_s + speed.context_s * (turn.prompt_tokens + turn.new_tokens / 2))
        drawn += turn.new_tokens
    tokens = sum(turn.prompt_tokens + turn.new_tokens for turn in turns) / max(1, len(turns))
    together = max(1.0, min(machine.running, machine.kv_tokens / max(1.0, tokens)))
    busy_s = prompts_s + steps_s
    return busy_s + speed.step_s * max(drawn / together, busy_s / (machine.step_budget_s - speed.step_s))


def alone_s(arrival: Arrival, cached: int, machine: Machine) -> tuple[float, float]:
    """Seconds to the first and to the last token of `arrival` on an idle `machine` that holds `cached` of its tokens.

    At most by a few percent less than the engine takes, which ends its steps a little before their time is up.
    """
    speed, fresh = machine.speed, arrival.prompt_tokens - cached
    prompt_s = fresh * (speed.token_s + speed.pair_s * (cached + fresh / 2))
    steps = max(1, -(-prompt_s // (machine.step_budget_s - speed.step_s)))
    first_s = prompt_s + steps * speed.step_s
    later = arrival.new_tokens - 1
    context = arrival.prompt_tokens + arrival.new_tokens / 2
    return first_s, first_s + later * (speed.step_s + speed.sequence_s + speed.context_s * context)


def evenly(rng: random.Random, sessions: int) -> list[float]:
    """Sessions begin at any time, independent of one another."""
    return sorted(rng.random() for _ in range(sessions))


def in_bursts(rng: random.Random, sessions: int) -> list[float]:
    """Two thirds of the sessions begin within five short bursts."""
    bursts = [(number + rng.random()) / 5 for number in range(5)]
    return sorted(
        min(1.0, rng.choice(bursts) + 0.01 * rng.random()) if rng.random() < 0.66 else rng.random()
        for _ in range(sessions)
    )


def _around(rng: random.Random, median: float, spread: float, least: int, most: int) -> int:
    """A log-normal number of tokens."""
    return max(least, min(most, round(median * rng.lognormvariate(0.0, spread))))


def _named(names: Iterator[int], tokens: int) -> tuple[int, ...]:
    """New names for the whole chunks of so many tokens."""
    return tuple(itertools.islice(names, tokens // CHUNK_TOKENS))


def _chats(rng: random.Random, requests: int) -> list[Session]:
    names = itertools.count(1)
    systems = [_named(names, CHUNK_TOKENS * rng.randint(1, 2)) for _ in range(5)]
    sessions: list[Session] = []
    for _ in range(requests):
        system = rng.choice(systems)
        own = _around(rng, 300, 0.8, 20, 3000)
        tokens = len(system) * CHUNK_TOKENS + own
        sessions.append((SessionRequest(0.0, tokens, _around(rng, 180, 0.7, 10, 800), system),))
    return sessions


def _conversations(rng: random.Random, requests: int) -> list[Session]:
    names = itertools.count(1)
    systems = [_named(names, 2 * CHUNK_TOKENS) for _ in range(3)]
    sessions: list[Session] = []
    while sum(map(len, sessions)) < requests:
        chunks, at_s, turns = rng.choice(systems), 0.0, []
        tokens = len(chunks) * CHUNK_TOKENS
        for _ in range(rng.randint(2, 6)):
            tokens += _around(rng, 250, 0.9, 20, 4000)
            chunks += _named(names, tokens - len(chunks) * CHUNK_TOKENS)
            answer = _around(rng, 120, 0.6, 20, 600)
            turns.append(SessionRequest(at_s, tokens, answer, chunks))
            tokens += answer
            at_s += answer * 0.03 + rng.expovariate(0.5)
        sessions.append(tuple(turns))
    return sessions


def _question(rng: random.Random, document: tuple[int, ...], *, at_s: float = 0.0) -> SessionRequest:
    tokens = len(document) * CHUNK_TOKENS + _around(rng, 120, 0.6, 20, 500)
    return SessionRequest(at_s, tokens, _around(rng, 120, 0.5, 20, 400), document)


def _library(rng: random.Random, names: Iterator[int], documents: int) -> list[tuple[int, ...]]:
    return [_named(names, CHUNK_TOKENS * rng.randint(6, 40)) for _ in range(documents)]


def _popular(rng: random.Random, library: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """A document by Zipf's law: the n-th is asked for 1/n times as often as the first."""
    return rng.choices(library, [1 / rank for rank in range(1, len(library) + 1)])[0]


def _documents(rng: random.Random, requests: int) -> list[Session]:
    library = _library(rng, itertools.count(1), 120)
    return [(_question(rng, _popular(rng, library)),) for _ in range(requests)]


def _hot_document(rng: random.Random, requests: int) -> list[Session]:
    """From a third of the sessions on, half of them ask for one new document."""
    names = itertools.count(1)
    library = _library(rng, names, 120)
    hot = _named(names, 30 * CHUNK_TOKENS)
    return [
        (_question(rng, hot if number > requests / 3 and rng.random() < 0.5 else _popular(rng, library)),)
        for number in range(requests)
    ]


def _agents(rng: random.Random, requests: int) -> list[Session]:
    """Each task is a tree of calls: all calls share the agent's instructions, and a call its parent's prompt."""
    names = itertools.count(1)
    agents = [_named(names, CHUNK_TOKENS * rng.randint(4, 10)) for _ in range(4)]
    sessions: list[Session] = []
    while sum(map(len, sessions)) < requests:
        turns: list[SessionRequest] = []
        _call(rng, names, turns, rng.choice(agents), at_s=0.0, depth=rng.randint(1, 3))
        sessions.append(tuple(turns))
    return sessions


def _call(
    rng: random.Random,
    names: Iterator[int],
    turns: list[SessionRequest],
    parent: tuple[int, ...],
    *,
    at_s: float,
    depth: int,
) -> None:
    """A call with several steps, each after a tool's result; at one of them it calls others side by side."""
    chunks, tokens = parent, len(parent) * CHUNK_TOKENS
    forks_at = rng.randint(0, 2)
    for step in range(3):
        tokens += _around(rng, 800, 0.8, 50, 6000)
        chunks += _named(names, tokens - len(chunks) * CHUNK_TOKENS)
        answer = _around(rng, 70, 0.6, 10, 300)
        turns.append(SessionRequest(at_s, tokens, answer, chunks))
        tokens += answer
        at_s += 0.3 + answer * 0.03 + rng.expovariate(2.0)
        if depth > 1 and step == forks_at:
            for _ in range(rng.randint(2, 4)):
                _call(rng, names, turns, chunks, at_s=at_s, depth=depth - 2)


def _long_prompts(rng: random.Random, requests: int) -> list[Session]:
    names = itertools.count(1)
    sizes = (_around(rng, 10_000, 0.7, 2000, 60_000) for _ in range(requests))
    return [(SessionRequest(0.0, tokens, _around(rng, 40, 0.5, 5, 150), _named(names, tokens)),) for tokens in sizes]


def _long_answers(rng: random.Random, requests: int) -> list[Session]:
    return [
        (SessionRequest(0.0, _around(rng, 150, 0.8, 20, 1000), _around(rng, 700, 0.6, 100, 3000)),)
        for _ in range(requests)
    ]


def _together(*parts: tuple[Draw, float]) -> Draw:
    """Sessions of several kinds, shuffled; each kind has its share of the requests."""

    def draw(rng: random.Random, requests: int) -> list[Session]:
        sessions: list[Session] = []
        for number, (part, share) in enumerate(parts, start=1):
            # names of different kinds differ
            sessions += [_renamed(session, number << 40) for session in part(rng, round(share * requests))]
        rng.shuffle(sessions)
        return sessions

    return draw


def _renamed(session: Session, offset: int) -> Session:
    return tuple(turn._replace(chunks=tuple(name + offset for name in turn.chunks)) for turn in session)


def _batch(rng: random.Random, requests: int) -> list[Session]:
    names = itertools.count(1)
    task = _named(names, 4 * CHUNK_TOKENS)
    sessions: list[Session] = []
    for _ in range(requests):
        tokens = len(task) * CHUNK_TOKENS + _around(rng, 3000, 0.6, 500, 12_000)
        sessions.append((SessionRequest(0.0, tokens, _around(rng, 300, 0.5, 50, 1000), task, BATCH),))
    return sessions


def _floored(rng: random.Random, requests: int) -> list[Session]:
    return [(turn._replace(priority=FLOORED),) for (turn,) in _documents(rng, requests)]


_USUAL = _together((_chats, 0.5), (_documents, 0.5))

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("chat", "single questions behind one of five system prompts", _chats, evenly, 400),
        Workload("conversations", "two to six turns, each behind all earlier ones", _conversations, evenly, 400),
        Workload("documents", "questions about 120 documents, by Zipf's law", _documents, evenly),
        Workload("agents", "trees of calls with tools, which share their parents' prompts", _agents, evenly, 500),
        Workload("long prompts", "prompts of 2k to 60k tokens, answers of about 40", _long_prompts, evenly, 160),
        Workload("long answers", "prompts of about 150 tokens, answers of about 700", _long_answers, evenly, 240),
        Workload("bursts", "chat and documents, two thirds of them in five bursts", _USUAL, in_bursts),
        Workload("hot document", "documents; a new one suddenly gets half of the requests", _hot_document, evenly),
        Workload(
            "slow backend",
            "chat and documents; one backend of eight becomes four times slower",
            _USUAL,
            evenly,
            changes=(Slowdown(0.3, "own-0", 4.0),),
        ),
        Workload(
            "joining backend",
            "chat and documents; the eighth backend joins later",
            _USUAL,
            evenly,
            changes=(Joining(0.3, "own-7"),),
        ),
        Workload(
            "mixed hardware",
            "conversations on four backends and four of half their speed",
            _conversations,
            evenly,
            400,
            speeds=(1.0,) * 4 + (0.5,) * 4,
        ),
        Workload(
            "batch beside chat",
            "chat, and long requests without haste",
            _together((_chats, 0.6), (_batch, 0.4)),
            evenly,
        ),
        Workload(
            "mixed kinds",
            "chat and documents on four of our shards and four engines that serve first come, first served",
            _USUAL,
            evenly,
            first_come=4,
        ),
        Workload(
            "floors",
            "chat, and documents of a class that comes after it but has a floor",
            _together((_chats, 0.7), (_floored, 0.3)),
            evenly,
        ),
    )
}
"""All workloads by name."""

"""A view that is updated where something changed is the view that is built from scratch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.errors import BackendFailed, Overloaded
from policies.nouns import ClusterView, Delta, Usage
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Elsewhere, Flight, Traffic
from tests.policies.builders import a_request

STEPS = 3000
REACHED = Description(frozenset({"llama", "sql"}), reports_cache=True, preempts=True)
DESCRIBED = [
    None,
    REACHED,
    Description(frozenset({"llama"}), context_tokens=8000, may_answer_whole=True),
    Description(frozenset({"llama", "sql"}), tuned=frozenset({"sql"}), loadable=frozenset({"sql"})),
    Description(frozenset({"llama", "sql"}), tuned=frozenset({"sql"})),
]


@dataclass
class Described(FakeBackend):
    """A fake that describes itself as a test says."""

    says: Description | None = REACHED

    def describe(self) -> Description | None:
        return self.says


@dataclass
class History:
    """A cluster of five backends to which random things happen."""

    rng: random.Random
    now: float = 100.0
    flying: list[Flight] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backends = [Described(f"b{number}", says=self.rng.choice(DESCRIBED)) for number in range(5)]
        self.cluster = Cluster(self.backends, clock=lambda: self.now, rng=self.rng)
        self.events = (
            *(self.pass_time, self.report, self.describe, self.begin, self.begin, self.begin),
            *(self.answer, self.answer, self.answer, self.end, self.end, self.probe, self.drain, self.weigh),
            *(self.hear_elsewhere, self.leave, self.refuse),
        )

    @property
    def backend(self) -> Described:
        return self.rng.choice(self.backends)

    def step(self) -> str:
        """Let one random thing happen; its name."""
        event = self.rng.choice(self.events)
        event()
        return event.__name__

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.0, 0.01, 0.5, 4.0])

    def report(self) -> None:
        maybe = lambda most: self.rng.choice([None, self.rng.randint(0, most)])  # noqa: E731
        self.backend.reported = Load(
            *(maybe(20), maybe(5), maybe(50_000), maybe(100_000), maybe(100_000), maybe(12)),
            prefill_s_per_token=self.rng.choice([None, 1e-5, 1e-3]),
            reported_at=self.rng.choice([None, self.now, self.now - 0.5]),
            draining=self.rng.random() < 0.1,
            active_adapters=self.rng.choice([None, frozenset(), frozenset({"sql"})]),
            adapter_slots=maybe(2),
        )

    def describe(self) -> None:
        self.backend.says = self.rng.choice(DESCRIBED)

    def begin(self) -> None:
        request = a_request(
            prompt_tokens=self.rng.choice([10, 500, 4000]),
            rank=self.rng.randint(0, 2),
            preemptible=self.rng.random() < 0.3,
            stream=self.rng.random() < 0.5,
            model=self.rng.choice(["llama", "sql"]),
        )
        is_first_try = self.rng.random() < 0.9
        uncached = self.rng.randint(0, request.prompt_tokens)
        self.flying.append(self.cluster.begin(self.backend.name, request, uncached, is_first_try=is_first_try))

    def answer(self) -> None:
        if self.flying:
            flight = self.rng.choice(self.flying)
            is_whole = flight.is_silent and not flight.answered
            flight.heard(Delta(text="x", tokens=self.rng.randint(1, 9), is_whole=is_whole), self.now)

    def end(self) -> None:
        if self.flying:
            flight = self.flying.pop(self.rng.randrange(len(self.flying)))
            flight.usage = Usage(flight.request.prompt_tokens, flight.drawn_tokens)
            failure = self.rng.choice([None, None, None, BackendFailed("gone"), Overloaded("full")])
            self.cluster.end(flight, failure)

    def probe(self) -> None:
        failure = self.rng.choice([None, None, BackendFailed("no answer")])
        self.cluster._members[self.backend.name].probed(failure, now=self.now)

    def drain(self) -> None:
        self.cluster.drain(self.backend.name, self.rng.random() < 0.3)

    def weigh(self) -> None:
        self.cluster.weigh(self.backend.name, self.rng.choice([0.5, 1.0, 2.0]))

    def hear_elsewhere(self) -> None:
        traffic = Traffic(self.rng.randint(0, 5), self.rng.randint(0, 5), self.rng.randint(0, 9000), 0.0)
        there = Elsewhere(traffic, self.now - self.rng.random())
        self.cluster.hear_elsewhere({self.backend.name: there} if self.rng.random() < 0.7 else {})

    def leave(self) -> None:
        self.cluster._members[self.backend.name].is_leaving = self.rng.random() < 0.3

    def refuse(self) -> None:
        self.cluster._members[self.backend.name].limit.refuse()

    def views(self) -> tuple[ClusterView, ClusterView]:
        """What a random request sees, first as it was kept up to date, then with nothing remembered."""
        held = {self.backend.name: self.rng.randint(0, 500)}
        rank, model = self.rng.choice([None, 0, 1, 2]), self.rng.choice([None, "llama", "sql"])
        tokens = self.rng.choice([1.0, 300.0, 5000.0])
        kept = self.cluster.view(self.now, held, rank, tokens, model)
        for member in self.cluster._members.values():
            member.standing = member.model._snapshot = None
            member.flights._seen.clear()
        return kept, self.cluster.view(self.now, held, rank, tokens, model)


@pytest.mark.parametrize("seed", range(4))
def test_after_every_step_of_a_random_history_the_view_is_that_from_scratch(seed: int) -> None:
    history = History(random.Random(seed))
    for number in range(STEPS):
        event = history.step()
        kept, scratch = history.views()
        assert kept == scratch, f"step {number}: {event}"
        # what follows begins with a memory, and not every view is asked for
        for _ in range(history.rng.randint(0, 3)):
            history.step()
            if history.rng.random() < 0.5:
                history.cluster.view(history.now)
    for flight in history.flying:
        history.cluster.end(flight)
    history.cluster.check()


def test_what_did_not_change_is_not_made_again() -> None:
    cluster = Cluster([Described("b0"), Described("b1")], clock=lambda: 0.0)
    first, second = cluster._members.values()
    cluster.view(0.0)
    before = first.standing, second.standing
    cluster.begin("b1", a_request(), 100)
    cluster.view(5.0, {"b0": 64}, 1, 3000)
    assert first.standing is before[0]
    assert second.standing is not before[1]

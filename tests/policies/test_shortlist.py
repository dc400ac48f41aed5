"""Which backends of a large fleet are scored."""

from __future__ import annotations

import random

import pytest

from policies.nouns import BackendView, Capability
from policies.shortlist import HOLDERS, IDLEST, LARGE, OTHERS, Shortlist
from tests.policies.builders import a_backend, a_request

MANY = 500


def a_shortlist(*backends: BackendView) -> Shortlist:
    shortlist = Shortlist()
    for backend in backends:
        shortlist.note(backend)
    shortlist.check()
    return shortlist


def a_fleet(**what: object) -> list[BackendView]:
    """Backends b0, b1, ...: each has one waiting token more than the one before."""
    return [
        a_backend(f"b{number}", waiting_tokens=number, running=1, max_requests=10, **what) for number in range(MANY)
    ]


def names(shortlist: Shortlist, held: dict[str, int] | None = None, avoiding: tuple[str, ...] = ()) -> list[str]:
    return list(shortlist.names(a_request(prompt_tokens=1000), held or {}, avoiding, random.Random(1)))


def test_few_backends_are_all_candidates() -> None:
    fleet = a_fleet()[:LARGE]
    assert sorted(names(a_shortlist(*fleet))) == sorted(backend.name for backend in fleet)


def test_candidates_of_many_are_the_ones_that_hold_most_the_ones_with_least_to_do_and_some_others() -> None:
    held = {f"b{number}": number for number in range(400, 500)}
    found = names(a_shortlist(*a_fleet()), held)
    holders, idlest, others = found[:HOLDERS], found[HOLDERS : HOLDERS + IDLEST], found[HOLDERS + IDLEST :]
    assert set(holders) == {f"b{number}" for number in range(500 - HOLDERS, 500)}
    assert idlest == [f"b{number}" for number in range(IDLEST)]
    assert 0 < len(others) <= OTHERS
    assert len(set(found)) == len(found)


def test_among_backends_that_hold_equally_much_the_ones_with_least_to_do_are_candidates() -> None:
    held = {f"b{number}": 1000 for number in range(400, 420 + HOLDERS)}
    found = names(a_shortlist(*a_fleet()), held)
    assert set(found[:HOLDERS]) == {f"b{number}" for number in range(400, 400 + HOLDERS)}


def test_the_others_are_drawn_anew_for_each_request() -> None:
    shortlist, rng = a_shortlist(*a_fleet()), random.Random(1)
    seen = {name for _ in range(800) for name in shortlist.names(a_request(), {}, (), rng)}
    assert len(seen) == MANY, "each backend is a candidate now and then"


@pytest.mark.parametrize(
    "unable",
    [
        {"pool": "rented"},
        {"models": frozenset({"qwen"})},
        {"context_tokens": 1000},
        {"capabilities": frozenset()},
        {"healthy": False},
        {"draining": True},
    ],
)
def test_backends_that_cannot_take_the_request_are_no_candidates(unable: dict[str, object]) -> None:
    able = {"pool": "own", "capabilities": frozenset({Capability.LOGPROBS})}
    fleet = [a_backend(f"b{number}", **{**able, **(unable if number % 3 else {})}) for number in range(MANY)]
    request = a_request(prompt_tokens=1000, pools=("own",), needs=frozenset({Capability.LOGPROBS}))
    found = a_shortlist(*fleet).names(request, {"b1": 1000}, (), random.Random(1))
    assert found
    assert all(int(name[1:]) % 3 == 0 for name in found)


def test_full_backends_and_those_without_room_are_passed_over() -> None:
    full = [a_backend(f"f{number}", running=4, max_requests=4) for number in range(MANY)]
    crammed = [a_backend(f"c{number}", running=1, free_tokens=10) for number in range(MANY)]
    roomy = [a_backend(f"r{number}", running=3, waiting_tokens=900, max_requests=4) for number in range(IDLEST)]
    found = names(a_shortlist(*full, *crammed, *roomy), {"f0": 1000, "c0": 500, "c1": 990})
    assert found[: 1 + IDLEST] == ["c1", *sorted(backend.name for backend in roomy)]


def test_an_idle_backend_has_all_the_room_that_it_will_ever_have() -> None:
    busy = [a_backend(f"b{number}", running=1, free_tokens=10) for number in range(MANY)]
    assert "idle" in names(a_shortlist(*busy, a_backend("idle", free_tokens=10)))


def test_backends_to_avoid_are_no_candidates() -> None:
    avoiding = ("b0", "b3", "b499")
    assert not set(names(a_shortlist(*a_fleet()), {"b499": 1000}, avoiding)) & set(avoiding)


def test_of_several_kinds_the_ones_with_least_to_do_come_first() -> None:
    fleet = a_fleet()
    mixed = [a_backend(backend.name, waiting_tokens=backend.waiting_tokens, context_tokens=None if at % 2 else 64_000)
             for at, backend in enumerate(fleet)]  # fmt: skip
    assert names(a_shortlist(*mixed))[:IDLEST] == [f"b{number}" for number in range(IDLEST)]


def test_what_waits_counts_per_weight() -> None:
    shortlist = Shortlist()
    for backend in a_fleet():
        shortlist.note(backend, weight=0.001 if backend.name in ("b1", "b2") else 1.0)
    assert names(shortlist)[:IDLEST] == ["b0", *(f"b{number}" for number in range(3, IDLEST + 2))]


@pytest.mark.parametrize("seed", range(3))
def test_what_was_noted_last_counts(seed: int) -> None:
    rng, shortlist, noted = random.Random(seed), Shortlist(), dict[str, BackendView]()
    for _ in range(3000):
        name = f"b{rng.randrange(200)}"
        if rng.random() < 0.1:
            shortlist.forget(name)
            noted.pop(name, None)
        else:
            noted[name] = a_backend(
                name,
                waiting_tokens=rng.choice([0, 0, 100, 5000]),
                running=rng.randint(0, 5),
                max_requests=rng.choice([None, 4]),
                healthy=rng.random() < 0.9,
                context_tokens=rng.choice([8000, 64_000]),
            )
            shortlist.note(noted[name])
        shortlist.check()
    able = {name: backend for name, backend in noted.items() if backend.healthy}
    assert len(shortlist) == len(able) > LARGE
    idlest = names(shortlist)[:IDLEST]
    roomy = [
        backend for backend in able.values() if backend.max_requests is None or backend.running < backend.max_requests
    ]
    least = sorted(backend.waiting_tokens for backend in roomy)[:IDLEST]
    assert [able[name].waiting_tokens for name in idlest] == least

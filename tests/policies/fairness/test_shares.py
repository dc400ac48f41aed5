"""Shares of a server with too little for all."""

import random
from collections.abc import Callable
from itertools import count

import pytest

from policies.fairness.queue import FairQueue
from policies.fairness.ticket import Ticket
from policies.nouns import ServiceClass
from tests.policies.fairness.virtual_server import VirtualServer, a_queue, a_ticket, drain, jain

INTERACTIVE = ServiceClass("interactive", 0, weight=8)
BATCH = ServiceClass("batch", 1, floor=0.1)


def poisson(
    seed: int, *offers: tuple[float, Callable[[random.Random, float], Ticket]]
) -> Callable[[float], list[Ticket]]:
    """The tickets that have arrived by a time, from offers of (a second, a maker of tickets)."""
    rng, next_at = random.Random(seed), [0.0] * len(offers)

    def arrive(now: float) -> list[Ticket]:
        due = []
        for place, (rate, make) in enumerate(offers):
            while next_at[place] <= now:
                due.append(make(rng, next_at[place]))
                next_at[place] += rng.expovariate(rate)
        return sorted(due, key=lambda ticket: ticket.arrived_at)

    return arrive


def from_tenant(name: str, mean_s: float = 1.0, **what: str) -> Callable[[random.Random, float], Ticket]:
    return lambda rng, at: a_ticket(name, cost_s=rng.expovariate(1 / mean_s), arrived_at=at, **what)


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_ten_times_the_offer_is_not_more_of_the_server(slots: int) -> None:
    arrive = poisson(1, (10.0 * slots, from_tenant("loud")), (1.0 * slots, from_tenant("quiet")))
    server = VirtualServer(a_queue(), slots, arrive)
    server.run(800 / slots)
    assert jain([server.served["loud"], server.served["quiet"]]) >= 0.98


@pytest.mark.parametrize("slots", [1, 8])
def test_shares_are_as_the_weights(slots: int) -> None:
    arrive = poisson(2, (3.0 * slots, from_tenant("four")), (3.0 * slots, from_tenant("one")))
    server = VirtualServer(a_queue(four=4, one=1), slots, arrive)
    server.run(1500 / slots)
    assert server.served["four"] / (server.served["four"] + server.served["one"]) == pytest.approx(0.8, rel=0.05)


def test_long_prompts_beside_short_ones_share_seconds_and_not_requests() -> None:
    arrive = poisson(3, (20.0, from_tenant("chat", 0.1)), (0.1, from_tenant("novels", 20.0)))
    server = VirtualServer(a_queue(), 2, arrive)
    server.run(1000)
    assert jain([server.served["chat"], server.served["novels"]]) >= 0.98


def test_a_tenant_within_its_share_waits_about_one_ticket_however_loud_the_other_is() -> None:
    arrive = poisson(4, (40.0, from_tenant("loud", 0.5)), (0.8, from_tenant("quiet", 0.5)))
    server = VirtualServer(a_queue(), 4, arrive)
    server.run(300)
    waits = sorted(at - ticket.arrived_at for at, ticket in server.taken if ticket.tenant == "quiet")
    assert waits[int(0.95 * len(waits))] < 1.0


@pytest.mark.parametrize("slots", [1, 8])
def test_interactive_goes_first_and_batch_moves_at_its_floor(slots: int) -> None:
    arrive = poisson(
        5,
        (1.2 * slots, from_tenant("acme", service_class="interactive")),
        (0.3 * slots, from_tenant("labs", service_class="batch")),
    )
    server = VirtualServer(a_queue(INTERACTIVE, BATCH), slots, arrive)
    server.run(6000 / slots)
    share = server.served["batch"] / (server.served["batch"] + server.served["interactive"])
    assert share == pytest.approx(0.1, rel=0.02)


def test_without_overload_a_floor_takes_nothing_from_those_in_front() -> None:
    arrive = poisson(
        6,
        (1.5, from_tenant("acme", service_class="interactive")),
        (9.0, from_tenant("labs", service_class="batch")),
    )
    server = VirtualServer(a_queue(INTERACTIVE, BATCH), 4, arrive)
    server.run(500)
    asked = sum(ticket.cost_s for at, ticket in server.taken if ticket.service_class == "interactive")
    assert server.served["interactive"] == pytest.approx(asked, rel=0.01)
    assert server.served["batch"] > 4 * 0.5 * 500


def test_a_class_that_was_idle_long_has_not_saved_up_its_floor() -> None:
    queue = a_queue(INTERACTIVE, BATCH)
    for _ in range(1000):
        queue.charge(a_ticket("acme", "interactive"), now=0.0)
    for _ in range(100):
        queue.push(a_ticket("labs", "batch"), now=1.0)
        queue.push(a_ticket("acme", "interactive"), now=1.0)
    first = [ticket.service_class for ticket in drain(queue, now=1.0)[:50]]
    assert first.count("batch") <= 6


def test_a_class_that_had_the_server_to_itself_is_back_at_its_floor_after_a_window() -> None:
    queue = a_queue(INTERACTIVE, BATCH)
    for _ in range(1000):
        queue.charge(a_ticket("labs", "batch"), now=0.0)
    for _ in range(300):
        queue.push(a_ticket("labs", "batch"), now=0.0)
        queue.push(a_ticket("acme", "interactive"), now=0.0)
    served = [ticket.service_class for ticket in drain(queue, now=0.0)]
    assert "batch" not in served[:50]
    assert served[75:175].count("batch") in {9, 10, 11}


def test_classes_of_equal_rank_by_age_share_by_weight() -> None:
    arrive = poisson(
        7,
        (2.0, from_tenant("acme", service_class="interactive")),
        (2.0, from_tenant("labs", service_class="batch")),
    )
    server = VirtualServer(a_queue(INTERACTIVE, ServiceClass("batch", 1, weight=2), ageing_s=1.0), 2, arrive)
    server.run(1500)
    assert server.served["batch"] / (server.served["batch"] + server.served["interactive"]) == pytest.approx(
        0.2, rel=0.05
    )


def test_ageing_does_not_undo_fairness_between_tenants() -> None:
    arrive = poisson(
        8,
        (20.0, from_tenant("loud", service_class="batch")),
        (3.0, from_tenant("quiet", service_class="batch")),
    )
    server = VirtualServer(a_queue(INTERACTIVE, BATCH, ageing_s=5.0), 4, arrive)
    server.run(500)
    assert jain([server.served["loud"], server.served["quiet"]]) >= 0.98


@pytest.mark.parametrize("slots", [1, 8])
def test_costs_that_were_predicted_wrong_are_evened_out(slots: int) -> None:
    arrive = poisson(9, (3.0 * slots, from_tenant("honest")), (3.0 * slots, from_tenant("longer")))
    actual: Callable[[Ticket], float] = lambda ticket: ticket.cost_s * (5 if ticket.tenant == "longer" else 1)  # noqa: E731
    server = VirtualServer(a_queue(), slots, arrive, actual)
    server.run(2000 / slots)
    assert jain([server.served["honest"], server.served["longer"]]) >= 0.98


@pytest.mark.parametrize("slots", [1, 8])
def test_a_tenant_that_was_charged_too_much_gets_it_back(slots: int) -> None:
    arrive = poisson(10, (4.0 * slots, from_tenant("honest")), (4.0 * slots, from_tenant("shorter", 5.0)))
    actual: Callable[[Ticket], float] = lambda ticket: ticket.cost_s / (5 if ticket.tenant == "shorter" else 1)  # noqa: E731
    server = VirtualServer(a_queue(), slots, arrive, actual)
    server.run(2000 / slots)
    assert jain([server.served["honest"], server.served["shorter"]]) >= 0.98


def test_a_tenant_that_comes_late_is_neither_punished_nor_favoured() -> None:
    early = poisson(11, (4.0, from_tenant("a")), (4.0, from_tenant("b")))
    late = poisson(12, (4.0, from_tenant("late")))
    server = VirtualServer(a_queue(), 2, lambda now: [*early(now), *(late(now) if now > 500 else [])])
    server.run(500)
    server.served.clear()
    server.run(1000)
    assert jain([server.served[name] for name in ("a", "b", "late")]) >= 0.99


def test_an_earlier_backlog_does_not_count_against_its_tenant() -> None:
    arrive = poisson(13, (8.0, from_tenant("a")))
    then = poisson(14, (8.0, from_tenant("b")))
    server = VirtualServer(a_queue(), 2, lambda now: [*arrive(now), *(then(now) if now > 300 else [])])
    server.run(300)
    server.served.clear()
    server.run(360)
    assert jain([server.served["a"], server.served["b"]]) >= 0.95


def test_a_thousand_tenants_have_equal_shares() -> None:
    names, numbers = [f"n{number}" for number in range(1000)], count()
    queue = a_queue()
    rng = random.Random(15)
    for number in range(6000):
        queue.push(a_ticket(names[number % 1000], cost_s=rng.uniform(0.5, 1.5)), now=0.0)
    served = dict.fromkeys(names, 0.0)
    while next(numbers) < 3000:
        ticket = queue.take(next(queue.order(0.0)).id, 0.0)
        served[ticket.tenant] += ticket.cost_s
    assert max(served.values()) - min(served.values()) <= 3.0
    assert jain(list(served.values())) >= 0.95


@pytest.mark.parametrize("seed", range(5))
def test_two_that_wait_all_the_time_differ_by_at_most_their_largest_costs(seed: int) -> None:
    rng = random.Random(seed)
    weights = {"a": 3.0, "b": 1.0, "c": 0.5}
    queue: FairQueue = a_queue(**weights)
    for _ in range(400):
        for name in weights:
            queue.push(a_ticket(name, cost_s=10 ** rng.uniform(-2, 2)), now=0.0)
    history = [dict.fromkeys(weights, 0.0)]
    while all(queue.of_tenant(name).requests for name in weights):
        ticket = queue.take(next(queue.order(0.0)).id, 0.0)
        history.append(history[-1] | {ticket.tenant: history[-1][ticket.tenant] + ticket.cost_s})
    for _ in range(500):
        begin, end = sorted(rng.sample(range(len(history)), 2))
        got = {name: (history[end][name] - history[begin][name]) / weights[name] for name in weights}
        assert abs(got["a"] - got["b"]) <= 100 / 3 + 100 / 1 + 1e-6
        assert abs(got["b"] - got["c"]) <= 100 / 1 + 100 / 0.5 + 1e-6

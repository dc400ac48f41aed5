import math
import random
from copy import deepcopy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.fairness.queue import FairQueue, effective_rank
from policies.fairness.tenants import DEBT_HALF_LIFE_S, Account, VirtualTime
from policies.fairness.ticket import Backlog, Ticket
from policies.nouns import ServiceClass
from tests.policies.fairness.virtual_server import a_queue, a_ticket, drain, some_classes

CHAT, RAG, BATCH = ServiceClass("chat", 0, weight=4), ServiceClass("rag", 1), ServiceClass("batch", 2, floor=0.1)


def names(tickets: list[Ticket]) -> list[str]:
    return [ticket.tenant for ticket in tickets]


def test_a_better_rank_overtakes_earlier_tickets() -> None:
    queue = a_queue(CHAT, RAG, ServiceClass("batch", 2))
    for name in ("batch", "rag", "chat"):
        queue.push(a_ticket(service_class=name), now=0.0)
    assert [ticket.service_class for ticket in queue.order(0.0)] == ["chat", "rag", "batch"]


def test_a_tenant_is_served_first_in_first_out() -> None:
    queue, tickets = a_queue(), [a_ticket(cost_s=cost) for cost in (5.0, 0.1, 3.0)]
    for ticket in tickets:
        queue.push(ticket, now=0.0)
    assert drain(queue) == tickets


def test_looking_changes_nothing_and_tickets_without_room_can_be_skipped() -> None:
    queue = a_queue()
    long, short = a_ticket("long", cost_s=100.0), a_ticket("short")
    queue.push(long, now=0.0)
    queue.push(short, now=0.0)
    assert list(queue.order(0.0)) == list(queue.order(0.0)) == [long, short]
    assert queue.take(short.id, now=1.0) == short
    assert list(queue.order(1.0)) == [long]


def test_changing_the_queue_while_iterating_is_an_error() -> None:
    queue = a_queue()
    for _ in range(3):
        queue.push(a_ticket(), now=0.0)
    walk = queue.order(0.0)
    queue.take(next(walk).id, now=0.0)
    with pytest.raises(RuntimeError, match="collect tickets first"):
        next(walk)


def test_a_tenant_skipped_for_lack_of_room_catches_up_within_a_bound() -> None:
    queue = a_queue()
    for _ in range(500):
        queue.push(a_ticket("long", shape="large"), now=0.0)
        queue.push(a_ticket("short", shape="small"), now=0.0)
    for _ in range(400):
        queue.take(next(ticket for ticket in queue.order(0.0) if ticket.shape == "small").id, now=0.0)
    then = names(list(queue.order(0.0)))
    assert then[:50] == ["long"] * 50
    assert then[70:90].count("short") == 10


def test_a_failed_ticket_goes_first_in_its_class_and_is_not_charged_again() -> None:
    queue = a_queue(CHAT, RAG)
    failed, others = a_ticket("acme", "rag", cost_s=50.0), [a_ticket("labs", "rag") for _ in range(3)]
    queue.push(failed, now=0.0)
    queue.take(failed.id, now=0.0)
    for ticket in others:
        queue.push(ticket, now=1.0)
    chat = a_ticket("labs", "chat")
    queue.push(chat, now=1.0)
    queue.push_front(failed)
    queue.check()
    assert list(queue.order(1.0)) == [chat, failed, *others]
    before = queue.ahead_s("rag", "acme", now=1.0)
    queue.take(failed.id, now=1.0)
    assert queue.ahead_s("rag", "acme", now=1.0) == before - failed.cost_s


def test_failed_tickets_go_again_in_the_order_of_their_arrival() -> None:
    queue, tickets = a_queue(), [a_ticket(arrived_at=float(at)) for at in range(3)]
    for ticket in tickets:
        queue.charge(ticket, now=3.0)
    for ticket in (tickets[1], tickets[2], tickets[0]):
        queue.push_front(ticket)
    assert drain(queue, now=4.0) == tickets


def test_a_removed_ticket_is_gone_and_not_charged() -> None:
    queue, tickets = a_queue(), [a_ticket("acme") for _ in range(3)]
    for ticket in tickets:
        queue.push(ticket, now=0.0)
    assert queue.remove(tickets[1].id) == tickets[1]
    assert queue.remove(tickets[1].id) is None
    assert drain(queue) == [tickets[0], tickets[2]]
    queue.check()


def test_waiting_requests_are_counted_by_class_and_by_tenant() -> None:
    queue = a_queue(CHAT, RAG)
    queue.push(a_ticket("acme", "chat", cost_s=2.0, tokens=10), now=0.0)
    queue.push(a_ticket("acme", "rag", cost_s=3.0, tokens=20), now=0.0)
    queue.push(a_ticket("labs", "rag", cost_s=4.0, tokens=30), now=0.0)
    assert len(queue) == 3
    assert queue.backlog == Backlog(3, 60, 9.0)
    assert queue.of_class("rag") == Backlog(2, 50, 7.0)
    assert queue.of_tenant("acme") == Backlog(2, 30, 5.0)
    assert queue.of_class("nobody") == queue.of_tenant("nobody") == Backlog()
    assert repr(queue) == "<FairQueue chat 1, rag 2; 9 s wait, 0 charged>"


def test_a_correction_happens_once() -> None:
    queue, ticket = a_queue(), a_ticket("acme")
    queue.charge(ticket, now=0.0)
    queue.push(a_ticket("labs"), now=0.0)
    owes = []
    for _ in range(2):
        queue.correct(ticket, 31.0, now=0.0)
        owes.append(queue.ahead_s("standard", "acme", now=0.0))
    queue.correct(a_ticket("acme"), 1000.0, now=0.0)
    owes.append(queue.ahead_s("standard", "acme", now=0.0))
    assert owes == [1.0, 1.0, 1.0]
    for _ in range(5):
        queue.push(a_ticket("acme"), now=0.0)
    for _ in range(30):
        queue.push(a_ticket("labs"), now=0.0)
    assert names(list(queue.order(0.0)))[:31] == ["labs"] * 31


def test_a_burst_into_an_idle_system_is_not_free_but_forgiven_in_time() -> None:
    queue = a_queue()
    for _ in range(1000):
        queue.charge(a_ticket("burst"), now=0.0)
    soon, later = deepcopy(queue), deepcopy(queue)
    for ticket, now in ((soon, 0.0), (later, 600.0)):
        for _ in range(200):
            ticket.push(a_ticket("burst"), now)
            ticket.push(a_ticket("other"), now)
    assert names(list(soon.order(0.0)))[:60] == ["other"] * 60
    assert names(list(soon.order(0.0)))[70:90].count("burst") == 10
    assert names(list(later.order(600.0)))[:20].count("burst") in {9, 10}


def test_an_account_keeps_its_debt_while_idle_and_no_credit() -> None:
    clock, debtor, idler = VirtualTime(), Account(1.0), Account(1.0)
    clock.serve(debtor, 100.0, now=0.0)
    clock.wake(debtor, now=DEBT_HALF_LIFE_S)
    assert debtor.tag == pytest.approx(50.0)
    clock.serve(debtor, 1.0, now=DEBT_HALF_LIFE_S)
    clock.wake(idler, now=1e6)
    assert idler.tag == pytest.approx(clock.reached) == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("rank", "waited_s", "effective"), [(0, 1e9, 0), (2, 9.9, 2), (2, 10, 1), (2, 1e9, 0), (1, -5, 1)]
)
def test_waiting_improves_a_rank_step_by_step_to_the_best(rank: int, waited_s: float, effective: int) -> None:
    assert effective_rank(rank, waited_s, ageing_s=10.0) == effective


@pytest.mark.parametrize("seed", range(3))
def test_no_ticket_waits_longer_than_the_bound_whatever_comes(seed: int) -> None:
    """Each second brings more work of the best rank than there is room for, and more from the victim's class."""
    rng, ageing_s, largest = random.Random(seed), 10.0, 4.0
    queue = a_queue(CHAT, ServiceClass("rag", 1, weight=1), ServiceClass("batch", 2, weight=1), ageing_s=ageing_s)
    others = [("chat", f"c{number}") for number in range(3)] + [("batch", f"b{number}") for number in range(4)]
    before = [a_ticket("victim", "batch", cost_s=rng.uniform(0, largest)) for _ in range(3)]
    for name, tenant in others:
        queue.push(a_ticket(tenant, name, cost_s=largest), now=0.0)
    for victim in before:
        queue.push(victim, now=0.0)
    now = since_s = 0.0
    while before[-1].id in queue:
        for name, tenant in others:
            queue.push(a_ticket(tenant, name, cost_s=rng.uniform(0, largest), arrived_at=now), now)
        ticket = queue.take(next(queue.order(now)).id, now)
        now += ticket.cost_s
        since_s += ticket.cost_s if now > 2 * ageing_s else 0.0
    weight, tenants, classes = 1 / (4 + 1), 5, 2
    own_s = sum(ticket.cost_s for ticket in before)
    assert since_s <= own_s / (weight / tenants) + (classes + tenants / weight) * largest


def test_with_a_floor_no_ticket_waits_even_that_long() -> None:
    queue = a_queue(CHAT, BATCH)
    victim = a_ticket("victim", "batch")
    queue.push(victim, now=0.0)
    taken = 0
    while victim.id in queue:
        queue.push(a_ticket("acme", "chat"), now=0.0)
        queue.take(next(queue.order(0.0)).id, now=0.0)
        taken += 1
    assert taken == 2


def test_what_is_ahead_of_a_new_ticket_counts_ranks_shares_and_floors() -> None:
    queue = a_queue(CHAT, RAG, BATCH)
    assert queue.ahead_s("chat", "acme", now=0.0) == 0.0
    for name, tenant, seconds in (("chat", "acme", 5.0), ("rag", "labs", 7.0), ("batch", "bulk", 11.0)):
        queue.push(a_ticket(tenant, name, cost_s=seconds), now=0.0)
    assert queue.ahead_s("chat", "acme", now=0.0) == pytest.approx(5.0 / 0.9)
    assert queue.ahead_s("chat", "new", now=0.0) == pytest.approx(5.0 / 0.9), "the first class is served first"
    assert queue.ahead_s("rag", "labs", now=0.0) == pytest.approx(12.0 / 0.9)
    assert queue.ahead_s("batch", "bulk", now=0.0) == pytest.approx(23.0)
    assert queue.ahead_s("batch", "new", now=0.0) == pytest.approx(23.0)
    queue.take(next(queue.order(0.0)).id, now=0.0)
    assert queue.ahead_s("batch", "bulk", now=0.0) == pytest.approx(18.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_estimated_work_ahead_is_about_the_work_served_before(seed: int) -> None:
    rng, queue = random.Random(seed), a_queue(CHAT, RAG, BATCH)
    for _ in range(600):
        name = rng.choice(["chat", "rag", "batch"])
        queue.push(a_ticket(f"n{rng.randrange(10)}", name, cost_s=rng.uniform(0.5, 1.5)), now=0.0)
    for name in ("chat", "rag", "batch"):
        for tenant in ("n3", "new"):
            copied, ahead_s, served = deepcopy(queue), queue.ahead_s(name, tenant, now=0.0), 0.0
            ticket = a_ticket(tenant, name)
            copied.push(ticket, now=0.0)
            for other in copied.order(0.0):
                if other == ticket:
                    break
                served += other.cost_s
            # a floor of 0.1 lets one other ticket in for nine; ten tenants may each be one ticket ahead
            assert ahead_s == pytest.approx(served, rel=0.2, abs=20.0), (name, tenant)


def test_after_a_reload_what_waits_is_served_also_from_classes_and_tenants_that_are_gone() -> None:
    queue = a_queue(CHAT, RAG, BATCH, acme=8.0)
    queue.push(a_ticket("acme", "batch"), now=0.0)
    queue.push(a_ticket("acme", "chat"), now=0.0)
    queue.push(a_ticket("labs", "rag"), now=0.0)
    running = a_ticket("acme", "chat")
    queue.charge(running, now=0.0)
    queue.reconfigure(some_classes(ServiceClass("rag", 0), ServiceClass("new", 1)), {"labs": 2.0}, ageing_s=60.0)
    queue.check()
    queue.push(a_ticket("labs", "new"), now=1.0)
    assert [ticket.service_class for ticket in drain(queue, now=1.0)] == ["rag", "new", "batch", "chat"]
    queue.reconfigure(some_classes(RAG), {}, ageing_s=60.0)
    queue.correct(running, 5.0, now=2.0)
    queue.check()


def test_after_a_reload_new_weights_hold() -> None:
    queue = a_queue(a=1.0, b=1.0)
    for _ in range(100):
        queue.push(a_ticket("a"), now=0.0)
        queue.push(a_ticket("b"), now=0.0)
    queue.reconfigure(some_classes(), {"a": 4.0, "b": 1.0}, ageing_s=30.0)
    assert names(list(queue.order(0.0)))[:50].count("a") == 40


@pytest.mark.parametrize(
    ("classes", "weights", "ageing_s"),
    [((CHAT,), {"acme": 0.0}, 30.0), ((ServiceClass("chat", 0, weight=-1),), {}, 30.0), ((CHAT,), {}, 0.0)],
)
def test_weights_and_ageing_that_cannot_be_are_refused_and_change_nothing(
    classes: tuple[ServiceClass, ...], weights: dict[str, float], ageing_s: float
) -> None:
    queue = a_queue(CHAT)
    with pytest.raises(ValueError, match="above zero"):
        queue.reconfigure(some_classes(*classes), weights, ageing_s)
    queue.push(a_ticket(service_class="chat"), now=0.0)
    queue.check()


@pytest.mark.parametrize("cost_s", [-1.0, math.nan, math.inf])
def test_costs_that_are_no_seconds_are_refused(cost_s: float) -> None:
    queue, ticket = a_queue(), a_ticket()
    for put in (queue.push, queue.charge):
        with pytest.raises(ValueError, match="finite number of seconds"):
            put(a_ticket(cost_s=cost_s), now=0.0)
    queue.check()
    queue.charge(ticket, now=0.0)
    with pytest.raises(ValueError, match="finite number of seconds"):
        queue.correct(ticket, cost_s, now=0.0)


def test_a_ticket_cannot_be_in_two_places() -> None:
    queue, ticket = a_queue(), a_ticket()
    with pytest.raises(ValueError, match="never taken"):
        queue.push_front(ticket)
    with pytest.raises(KeyError):
        queue.take(ticket.id, now=0.0)
    queue.push(ticket, now=0.0)
    for put in (queue.push, queue.charge):
        with pytest.raises(ValueError, match="waits already"):
            put(ticket, now=0.0)
    with pytest.raises(ValueError, match="take or remove it"):
        queue.correct(ticket, 1.0, now=0.0)
    queue.take(ticket.id, now=0.0)
    with pytest.raises(ValueError, match="not corrected yet"):
        queue.push(ticket, now=0.0)
    queue.check()


class AnyHistory(RuleBasedStateMachine):
    """After anything that can happen: sums agree, a walk foresees what taking one by one does, nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.left = 0.0, list[str]()
        self.waiting: dict[str, Ticket] = {}
        self.running: dict[str, Ticket] = {}

    @initialize(ageing_s=st.sampled_from([1.0, 30.0, 1e9]))
    def begin(self, ageing_s: float) -> None:
        self.queue = a_queue(CHAT, RAG, BATCH, ageing_s=ageing_s, a=2.0, b=0.5)

    @rule(
        tenant=st.sampled_from("abcd"),
        name=st.sampled_from(["chat", "rag", "batch", "gone"]),
        cost_s=st.sampled_from([0.0, 0.01, 1.0, 1.0, 300.0]),
    )
    def push(self, tenant: str, name: str, cost_s: float) -> None:
        ticket = a_ticket(tenant, name, cost_s=cost_s, arrived_at=self.now)
        self.queue.push(ticket, self.now)
        self.waiting[ticket.id] = ticket

    @rule(tenant=st.sampled_from("abcd"), name=st.sampled_from(["chat", "batch"]))
    def charge(self, tenant: str, name: str) -> None:
        ticket = a_ticket(tenant, name, arrived_at=self.now)
        self.queue.charge(ticket, self.now)
        self.running[ticket.id] = ticket

    @precondition(lambda self: self.waiting)
    @rule(skip=st.integers(0, 8))
    def take(self, skip: int) -> None:
        tickets = list(self.queue.order(self.now))
        ticket = self.queue.take(tickets[skip % len(tickets)].id, self.now)
        self.running[ticket.id] = self.waiting.pop(ticket.id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        assert self.queue.remove(ticket.id) == ticket
        self.queue.correct(ticket, 0.5, self.now)
        self.left.append(ticket.id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), factor=st.sampled_from([0.0, 0.2, 1.0, 5.0]))
    def finish(self, data: st.DataObject, factor: float) -> None:
        ticket = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.queue.correct(ticket, ticket.cost_s * factor, self.now)
        self.left.append(ticket.id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        ticket = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.queue.push_front(ticket)
        self.waiting[ticket.id] = ticket

    @rule(classes=st.sampled_from([(CHAT, RAG, BATCH), (BATCH, CHAT), (RAG,)]), weight=st.sampled_from([0.1, 1.0, 8.0]))
    def reload(self, classes: tuple[ServiceClass, ...], weight: float) -> None:
        self.queue.reconfigure(some_classes(*classes), {"a": weight, "c": 1.0}, ageing_s=30.0)

    @rule(seconds=st.sampled_from([0.1, 7.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_queue_agrees_with_the_history(self) -> None:
        self.queue.check()
        order = list(self.queue.order(self.now))
        assert sorted(ticket.id for ticket in order) == sorted(self.waiting)
        assert len(self.left) == len(set(self.left))
        assert all(self.queue.ahead_s(name, "a", self.now) >= 0 for name in ("chat", "rag", "batch"))
        if order:
            assert order[0] == simple_first(self.queue, list(self.waiting.values()), self.now)
            assert order == drain(deepcopy(self.queue), self.now)


def simple_first(queue: FairQueue, waiting: list[Ticket], now: float) -> Ticket:
    """The rules read aloud over a plain list of what waits; of the queue only accounts are used."""
    turns, paid = queue._turns, {ticket.id for ticket in waiting if ticket.id in queue._charged}
    by_class = {name: [ticket for ticket in waiting if ticket.service_class == name] for name in turns.standings}

    def turn(name: str) -> tuple[object, ...]:
        standing, oldest = turns.standings[name], min(ticket.arrived_at for ticket in by_class[name])
        steps = int((now - oldest) / turns.ageing_s) if standing.rank else 0
        owed = standing.owed_s / standing.floor if standing.owed_s > 0 else 0.0
        tag = max(standing.account.tag, turns.clock.reached)
        by_age = (max(0, standing.rank - steps), tag) if not owed else ()
        return (-owed, *by_age, standing.rank, name)

    # a class below its floor goes before all others, so the two kinds of keys never meet
    name = min((name for name in by_class if by_class[name]), key=turn)
    mine, queues = by_class[name], queue._queues[name]
    if back := [ticket for ticket in mine if ticket.id in paid]:
        return min(back, key=lambda ticket: (ticket.arrived_at, ticket.id))
    heads: dict[str, Ticket] = {}
    for ticket in sorted(mine, key=lambda each: int(each.id[1:])):
        heads.setdefault(ticket.tenant, ticket)
    places = {tenant: queues.tenants[tenant].place or (0.0, 0, "") for tenant in heads}
    return heads[min(heads, key=lambda tenant: (queues.tenants[tenant].account.tag, places[tenant][1]))]


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""The dispatcher: waiting requests are placed in fair order as soon as there is room, and none is lost."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from backends.base import Load
from backends.fake import FakeBackend
from policies.errors import BackendFailed, NoBackend, Overloaded
from policies.nouns import ClusterView, Decision, Prompt, Request, ServiceClass
from policies.sla.config import Config
from router.call.bid import Bid, Look, Placed
from router.call.dispatch import MOST_FAILED_LOOKS, MOST_SEEN, PATIENCE, PAUSE_S, Dispatcher
from router.fleet.cluster.cluster import Cluster
from tests.policies.builders import a_request
from tests.router.parts import MODEL, a_config, a_tenant
from tests.virtual_time import run_virtually

CLASSES = {"chat": ServiceClass("chat", 0), "batch": ServiceClass("batch", 1, preemptible=True)}


class Stage:
    """A dispatcher in front of backends with `slots` each, on the running loop's clock."""

    def __init__(self, *, backends: int = 1, slots: int = 1, most: int = 100, most_running: int = 100) -> None:
        self.backends = [FakeBackend(f"b{n}", "own", models=frozenset({MODEL})) for n in range(backends)]
        for backend in self.backends:
            backend.reported = Load(max_requests=slots)
        config = a_config(a_tenant("acme"), a_tenant("labs"), max_queued=most, max_concurrent=most_running)
        self.config: Config = replace(config, classes=CLASSES, ageing_s=10.0)
        self.clock = asyncio.get_running_loop().time
        self.cluster = Cluster(self.backends, clock=self.clock)
        self.waiting: dict[str, int] = {}
        self.held: dict[str, dict[str, int]] = {}
        self.dispatcher = Dispatcher(
            self.cluster,
            self.config,
            self.clock,
            on_waiting=lambda name, count: self.waiting.update({name: count}),
        )
        self.cluster.on_changed = self.dispatcher.changed
        self._made = 0

    async def well(self) -> Stage:
        for backend in self.backends:
            assert await self.cluster.probe(backend.name)
        return self

    def bid(self, name: str = "", *, rank: int = 0, tenant: str = "acme", **what: Any) -> Bid:
        self._made += 1
        given = CLASSES["batch" if rank else "chat"]
        fields = {"id": name or f"r{self._made}", "tenant": tenant, "model": MODEL, "service_class": given.name}
        request = a_request(**{**fields, "rank": rank, "preemptible": given.preemptible, **what})

        def decide(asked: Request, avoiding: Any, look: Look) -> tuple[ClusterView, Decision]:
            view = self.cluster.view(self.clock(), self.held.get(asked.id), rank=asked.rank)
            backends = (
                structs.replace(each, awaited=look.awaited[each.name]) if each.name in look.awaited else each
                for each in view.backends
            )
            view = structs.replace(view, backends=tuple(backends))
            policy, rng = self.config.policies["default"], random.Random(0)
            return view, policy.decide(asked, view, rng, avoiding=avoiding, takes_any=look.takes_any)

        return Bid(
            request,
            Prompt(),
            given,
            new_tokens=10,
            arrived_at=self.clock(),
            decide=decide,
            refusal=lambda *_: NoBackend("no backend is left"),
            sent=lambda _: None,
            ended=lambda *_: None,
        )

    async def place(self, bid: Bid, seconds: float | None = None) -> Placed | None:
        found = self.dispatcher.look(bid)
        if found.is_free:
            return self.dispatcher.take(bid, found)
        return await self.dispatcher.wait(bid, found, seconds=seconds)

    def leave(self, placed: Placed | None) -> None:
        assert placed is not None
        self.cluster.end(placed.flight)
        self.dispatcher.correct(placed.bid, 1.0)

    def check(self) -> None:
        self.dispatcher.check()
        assert self.dispatcher.is_idle()
        self.cluster.check()


async def queued(stage: Stage, *bids: Bid) -> list[asyncio.Task[Placed | None]]:
    """`bids`, each waiting, in their order."""
    tasks = []
    for bid in bids:
        tasks.append(asyncio.create_task(stage.place(bid)))
        await asyncio.sleep(0)
    return tasks


def test_a_request_that_finds_room_is_placed_at_once_and_the_next_waits_until_it_ends() -> None:
    async def run() -> None:
        stage = await Stage().well()
        first = await stage.place(stage.bid())
        (second,) = await queued(stage, stage.bid())
        assert stage.waiting == {"chat": 1}
        await asyncio.sleep(5)
        assert not second.done()
        stage.leave(first)
        await asyncio.sleep(2 * PAUSE_S)
        assert stage.waiting == {"chat": 0}
        stage.leave(await second)
        stage.check()

    run_virtually(run())


def test_a_second_flight_begins_at_another_backend_beside_the_first() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        first = await stage.place(stage.bid())
        assert first is not None
        second = stage.dispatcher.second(first.bid, first, within_s=10.0)
        assert second is not None
        assert {first.chosen.name, second.chosen.name} == {"b0", "b1"}
        assert first.bid.avoiding == frozenset()
        assert second.flight.is_first_try, "its times are as good as others'"
        stage.cluster.end(second.flight)
        stage.leave(first)
        stage.check()

    run_virtually(run())


@pytest.mark.parametrize("reason", ["no room", "slower", "the router is full", "another waits"])
def test_no_second_flight_begins(reason: str) -> None:
    async def run() -> None:
        full = reason == "the router is full"
        stage = await Stage(backends=2, slots=2, most_running=2 if full else 100).well()
        first = await stage.place(stage.bid())
        assert first is not None
        others: list[Placed] = []
        tasks: list[asyncio.Task[Placed | None]] = []
        if reason in ("no room", "another waits"):
            for _ in range(3):
                other = await stage.place(stage.bid())
                assert other is not None
                others.append(other)
        if reason == "the router is full":
            other = await stage.place(stage.bid())
            assert other is not None
            others.append(other)
        if reason == "another waits":
            tasks = await queued(stage, stage.bid())
            stage.cluster.end(others[-1].flight)
        within_s = 0.0 if reason == "slower" else 10.0
        assert stage.dispatcher.second(first.bid, first, within_s=within_s) is None
        if tasks:
            stage.dispatcher.correct(others.pop().bid, 1.0)
            await asyncio.sleep(2 * PAUSE_S)
            stage.leave(await tasks[0])
        for other in others:
            stage.leave(other)
        stage.leave(first)
        stage.check()

    run_virtually(run())


def test_a_better_rank_that_came_later_goes_first() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        batch, chat = await queued(stage, stage.bid(rank=1), stage.bid())
        stage.leave(holder)
        stage.leave(await chat)
        assert not batch.done()
        stage.leave(await batch)
        stage.check()

    run_virtually(run())


def test_no_request_is_overtaken_by_one_of_its_kind_that_comes_just_when_room_appears() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        (waiting,) = await queued(stage, stage.bid())
        stage.leave(holder)
        (late,) = await queued(stage, stage.bid())
        stage.leave(await waiting)
        assert not late.done()
        stage.leave(await late)
        stage.check()

    run_virtually(run())


def test_what_needs_other_room_does_not_wait_behind_it() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        stage.backends[1].models = frozenset({"other"})
        holder = await stage.place(stage.bid())
        (waiting,) = await queued(stage, stage.bid())
        other = await stage.place(stage.bid(model="other"))
        assert not waiting.done()
        stage.leave(other)
        stage.leave(holder)
        stage.leave(await waiting)
        stage.check()

    run_virtually(run())


def test_small_prompts_pass_a_long_one_that_finds_no_room_until_it_has_waited_for_the_ageing_time() -> None:
    async def run() -> None:
        stage = await Stage(slots=10).well()
        stage.backends[0].reported = Load(max_requests=10, free_tokens=5000, reported_at=-1.0)
        holder = await stage.place(stage.bid(prompt_tokens=3000))
        (long,) = await queued(stage, stage.bid(prompt_tokens=4000))
        small = await stage.place(stage.bid(prompt_tokens=100))
        await asyncio.sleep(11)
        # a fresh report knows of both, and there is room for the small alone
        stage.backends[0].reported = Load(max_requests=10, free_tokens=2000, reported_at=stage.clock())
        stage.cluster.changed("b0")
        await asyncio.sleep(2 * PAUSE_S)
        (held_back,) = await queued(stage, stage.bid(prompt_tokens=100))
        await asyncio.sleep(1)
        assert not held_back.done()
        stage.leave(small)
        stage.leave(holder)
        await asyncio.sleep(2 * PAUSE_S)
        stage.leave(await long)
        stage.leave(await held_back)
        stage.check()

    run_virtually(run())


def only_at(name: str, bid: Bid) -> Bid:
    """`bid`, which no other of two backends may take."""
    bid.avoiding = frozenset({"b0", "b1"} - {name})
    return bid


def test_a_request_that_has_waited_long_keeps_no_other_from_backends_that_could_not_take_it() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        holders = [await stage.place(only_at(name, stage.bid())) for name in ("b0", "b1")]
        (old,) = await queued(stage, only_at("b0", stage.bid()))
        (next_,) = await queued(stage, stage.bid())
        await asyncio.sleep(11)
        stage.leave(holders[1])
        await asyncio.sleep(2 * PAUSE_S)
        assert next_.done()
        stage.leave(await next_)
        fresh = await asyncio.wait_for(stage.place(stage.bid()), 1.0)
        # and where it could go, it goes first
        (rival,) = await queued(stage, only_at("b0", stage.bid()))
        stage.leave(holders[0])
        stage.leave(await old)
        for placed in (fresh, await rival):
            stage.leave(placed)
        stage.check()

    run_virtually(run())


def test_many_kinds_without_room_keep_no_other_kind_from_its_room() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        holders = [await stage.place(only_at(name, stage.bid())) for name in ("b0", "b1")]
        kinds = [only_at("b0", stage.bid(prompt_tokens=2**size)) for size in range(2 * MOST_FAILED_LOOKS + 1)]
        front = await queued(stage, *kinds)
        (behind,) = await queued(stage, only_at("b1", stage.bid(rank=1)))
        stage.leave(holders[1])
        # the other backend tells of its load all the time
        for _ in range(20):
            await asyncio.sleep(PAUSE_S)
            stage.dispatcher.changed()
        assert behind.done()
        stage.leave(await behind)
        stage.leave(holders[0])
        for task in front:
            stage.leave(await task)
        stage.check()

    run_virtually(run())


def test_a_crowd_without_room_keeps_no_other_kind_from_its_room() -> None:
    async def run() -> None:
        stage = await Stage(backends=2, most=2 * MOST_SEEN).well()
        holders = [await stage.place(only_at(name, stage.bid())) for name in ("b0", "b1")]
        front = await queued(stage, *(only_at("b0", stage.bid()) for _ in range(MOST_SEEN + 1)))
        (behind,) = await queued(stage, only_at("b1", stage.bid(rank=1)))
        stage.leave(holders[1])
        await asyncio.sleep(5 * PAUSE_S)
        assert behind.done()
        stage.leave(await behind)
        for task in front:
            task.cancel()
        await asyncio.gather(*front, return_exceptions=True)
        stage.leave(holders[0])
        stage.check()

    run_virtually(run())


def test_a_request_past_its_time_gets_no_place_and_leaves_no_trace() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        before = stage.clock()
        assert await stage.place(stage.bid(), seconds=3.0) is None
        assert stage.clock() - before == pytest.approx(3.0)
        stage.leave(holder)
        stage.check()

    run_virtually(run())


@pytest.mark.parametrize("late", [False, True])
def test_a_request_cancelled_in_the_queue_gives_back_even_a_place_it_just_got(late: bool) -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        (waiting,) = await queued(stage, stage.bid())
        stage.leave(holder)
        if late:
            # placed, and cancelled before it could run
            asyncio.get_running_loop().call_later(PAUSE_S, lambda: asyncio.get_running_loop().call_soon(waiting.cancel))
            await asyncio.sleep(PAUSE_S)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        stage.check()
        stage.leave(await stage.place(stage.bid()))

    run_virtually(run())


def test_a_waiting_request_fails_at_once_when_no_backend_can_ever_take_it() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        (waiting,) = await queued(stage, stage.bid())
        stage.backends[0].models = frozenset({"other"})
        stage.cluster.changed("b0")
        before = stage.clock()
        with pytest.raises(NoBackend, match="no backend is left"):
            await waiting
        assert stage.clock() - before < 0.1
        stage.leave(holder)
        stage.check()

    run_virtually(run())


def test_a_waiting_request_stays_while_no_backend_is_well_and_goes_to_the_first_that_recovers() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        (waiting,) = await queued(stage, stage.bid())
        await asyncio.sleep(25)
        stage.cluster.drain("b0")
        stage.leave(holder)
        await asyncio.sleep(9)
        (fresh,) = await queued(stage, stage.bid())
        assert not waiting.done()
        stage.cluster.drain("b0", False)
        stage.leave(await waiting)
        stage.leave(await fresh)
        stage.check()

    run_virtually(run())


def test_no_request_waits_longer_than_the_file_allows_for_a_backend_to_recover() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        bids = [stage.bid() for _ in range(3)]
        waiting = await queued(stage, *bids)
        await asyncio.sleep(25)
        stage.cluster.drain("b0")
        began = stage.clock()
        await asyncio.sleep(4)
        (fresh,) = await queued(stage, stage.bid())
        for task in waiting:
            with pytest.raises(NoBackend, match="no backend is left"):
                await task
            assert stage.clock() - began == pytest.approx(stage.config.outage_s, abs=0.01)
        with pytest.raises(NoBackend):
            await fresh
        assert stage.clock() - began == pytest.approx(4 + stage.config.outage_s, abs=0.01)
        stage.leave(holder)
        stage.check()

    run_virtually(run())


def test_a_class_with_a_deadline_waits_until_then_for_a_backend_to_recover() -> None:
    async def run() -> None:
        stage = await Stage().well()
        stage.cluster.drain("b0")
        bid = stage.bid()
        bid.service_class = replace(bid.service_class, deadline_s=60.0)
        began = stage.clock()
        (waiting,) = await queued(stage, bid)
        with pytest.raises(NoBackend):
            await waiting
        assert stage.clock() - began == pytest.approx(60.0, abs=0.01)
        stage.check()

    run_virtually(run())


def test_each_outage_is_waited_for_anew() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        (waiting,) = await queued(stage, stage.bid())
        for _ in range(5):
            stage.cluster.drain("b0")
            await asyncio.sleep(9)
            stage.cluster.drain("b0", False)
            await asyncio.sleep(2)
        assert not waiting.done()
        stage.leave(holder)
        stage.leave(await waiting)
        stage.check()

    run_virtually(run())


def test_an_outage_teaches_nothing_about_the_rate_of_the_queue() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        probe = stage.bid()
        before_s = stage.dispatcher.wait_s(probe, stage.dispatcher.look(probe))
        (waiting,) = await queued(stage, stage.bid())
        stage.cluster.drain("b0")
        await asyncio.sleep(9)
        stage.cluster.drain("b0", False)
        stage.leave(holder)
        stage.leave(await waiting)
        holder = await stage.place(stage.bid())
        assert stage.dispatcher.wait_s(probe, stage.dispatcher.look(probe)) <= before_s * 1.01
        stage.leave(holder)
        stage.check()

    run_virtually(run())


def test_a_policy_that_fails_fails_one_request_and_not_the_queue() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        broken = stage.bid()
        first, second = await queued(stage, broken, stage.bid())

        def fail(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

        broken.decide = fail
        stage.leave(holder)
        with pytest.raises(ZeroDivisionError):
            await first
        stage.leave(await second)
        stage.check()

    run_virtually(run())


def test_a_failed_try_goes_first_when_it_comes_back_and_pays_once() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        first, second = await stage.place(stage.bid("one")), await stage.place(stage.bid("two"))
        assert first is not None
        (waiting,) = await queued(stage, stage.bid("three"))
        stage.cluster.end(first.flight, BackendFailed("gone"))
        first.bid.avoiding = frozenset({first.flight.backend})
        (again,) = await queued(stage, first.bid)
        await asyncio.sleep(2 * PAUSE_S)
        # the place that it left is not for it
        assert waiting.done()
        (fourth,) = await queued(stage, stage.bid("four"))
        stage.leave(second)
        stage.leave(await again)
        stage.leave(await waiting)
        stage.leave(await fourth)
        stage.check()

    run_virtually(run())


def test_a_full_queue_refuses_the_tenant_that_fills_it_and_makes_place_for_others() -> None:
    async def run() -> None:
        stage = await Stage(most=3).well()
        holder = await stage.place(stage.bid())
        flood = await queued(stage, *(stage.bid() for _ in range(3)))
        with pytest.raises(Overloaded, match="3 requests wait, which is the limit") as caught:
            await stage.place(stage.bid())
        assert caught.value.retry_after_s
        (other,) = await queued(stage, stage.bid(tenant="labs"))
        with pytest.raises(Overloaded):
            await flood[-1]
        stage.leave(holder)
        for task in (other, *flood[:-1]):
            stage.leave(await task)
        stage.check()

    run_virtually(run())


def test_room_kept_for_a_request_that_leaves_a_full_queue_goes_to_the_next_at_once() -> None:
    async def run() -> None:
        stage = await Stage(backends=2, most=4).well()
        running = [await stage.place(only_at(name, stage.bid())) for name in ("b0", "b1")]
        stage.backends[0].reported = Load(max_requests=10, free_tokens=2000, reported_at=-1.0)
        flood = await queued(stage, *(only_at("b1", stage.bid()) for _ in range(2)))
        flood += await queued(stage, only_at("b0", stage.bid(prompt_tokens=4000)))
        await asyncio.sleep(11)
        stage.backends[0].reported = Load(max_requests=10, free_tokens=2000, reported_at=stage.clock())
        stage.cluster.changed("b0")
        await asyncio.sleep(2 * PAUSE_S)
        # the long one has waited so long that no other may have the room it waits for
        (small,) = await queued(stage, only_at("b0", stage.bid(tenant="labs", prompt_tokens=100)))
        await asyncio.sleep(1)
        assert not small.done()
        (another,) = await queued(stage, only_at("b0", stage.bid(tenant="labs", prompt_tokens=100)))
        with pytest.raises(Overloaded):
            await flood.pop()
        await asyncio.sleep(2 * PAUSE_S)
        assert small.done()
        assert another.done()
        for placed in running:
            stage.leave(placed)
        for task in (small, another, *flood):
            stage.leave(await task)
        stage.check()

    run_virtually(run())


def test_no_more_run_than_the_server_may_have() -> None:
    async def run() -> None:
        stage = await Stage(slots=10, most_running=2).well()
        running = [await stage.place(stage.bid()) for _ in range(2)]
        (waiting,) = await queued(stage, stage.bid())
        await asyncio.sleep(1)
        assert not waiting.done()
        stage.leave(running[0])
        stage.leave(await waiting)
        stage.leave(running[1])
        stage.check()

    run_virtually(run())


@pytest.mark.parametrize("tokens", [100, 2048])
def test_a_request_without_room_keeps_none_of_any_size_from_room_while_the_queue_is_to_be_walked(tokens: int) -> None:
    async def run() -> None:
        stage = await Stage(slots=10).well()
        stage.backends[0].reported = Load(max_requests=10, free_tokens=5000, reported_at=-1.0)
        holder = await stage.place(stage.bid(prompt_tokens=2500))
        (long,) = await queued(stage, stage.bid(prompt_tokens=4000))
        # a report that makes no room for it, as shards send one after each step
        stage.cluster.changed("b0")
        small = stage.bid(prompt_tokens=tokens)
        found = stage.dispatcher.look(small)
        assert found.is_free
        stage.leave(stage.dispatcher.take(small, found))
        stage.leave(holder)
        stage.leave(await long)
        stage.check()

    run_virtually(run())


def test_waiting_requests_follow_a_new_file() -> None:
    async def run() -> None:
        stage = await Stage().well()
        holder = await stage.place(stage.bid())
        batch, chat = await queued(stage, stage.bid(rank=1), stage.bid())
        turned = {"batch": ServiceClass("batch", 0), "chat": ServiceClass("chat", 1)}
        stage.dispatcher.follow(replace(stage.config, classes=turned))
        stage.leave(holder)
        stage.leave(await batch)
        assert not chat.done()
        stage.leave(await chat)
        stage.check()

    run_virtually(run())


@pytest.mark.parametrize("seed", range(12))
def test_every_request_is_placed_or_gets_an_error_and_nothing_is_left(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        stage = await Stage(backends=2, slots=2, most=8).well()

        async def life() -> None:
            await asyncio.sleep(rng.random() * 3)
            bid = stage.bid(
                rank=rng.randrange(2), tenant=rng.choice(("acme", "labs")), prompt_tokens=rng.choice((10, 900))
            )
            try:
                placed = await stage.place(bid, rng.choice((None, 0.5, 2.0)))
                while placed is not None:
                    try:
                        await asyncio.sleep(rng.random())
                        failed = rng.random() < 0.2 and not bid.avoiding
                        stage.cluster.end(placed.flight, BackendFailed("x") if failed else None)
                    except asyncio.CancelledError:
                        stage.cluster.end(placed.flight, asyncio.CancelledError())
                        raise
                    if not failed:
                        break
                    bid.avoiding = frozenset({placed.flight.backend})
                    placed = await stage.place(bid)
            finally:
                if bid.is_charged:
                    stage.dispatcher.correct(bid, rng.random())

        lives = [asyncio.create_task(life()) for _ in range(40)]
        for _ in range(8):
            await asyncio.sleep(rng.random())
            rng.choice(lives).cancel()
            stage.dispatcher.check()
        results = await asyncio.gather(*lives, return_exceptions=True)
        allowed = (Overloaded, NoBackend, asyncio.CancelledError)
        assert all(result is None or isinstance(result, allowed) for result in results), results
        stage.check()

    run_virtually(run())


LONG = {"prompt_tokens": 40_000, "max_new_tokens": 10}


async def busy(stage: Stage, backends: int = 1) -> list[Placed]:
    """A request at each of the first `backends`, which have a place for one."""
    placed = []
    for at in range(backends):
        others = frozenset(backend.name for backend in stage.backends[at + 1 :])
        bid = stage.bid(f"busy{at}")
        bid.avoiding = others
        found = await stage.place(bid)
        assert found is not None
        placed.append(found)
    return placed


def test_a_long_prompt_waits_for_the_full_backend_that_holds_it_and_no_short_one_does() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        (first,) = await busy(stage)
        stage.held["long"] = {"b0": 40_000}
        (long,) = await queued(stage, stage.bid("long", **LONG))
        short = await stage.place(stage.bid("short", prompt_tokens=10))
        assert short is not None
        assert short.chosen.name == "b1"
        stage.leave(short)
        await asyncio.sleep(2 * PAUSE_S)
        assert not long.done(), "another backend is free, but would have to compute the whole prompt"
        stage.leave(first)
        placed = await long
        assert placed is not None
        assert placed.chosen.name == "b0"
        stage.leave(placed)
        stage.check()

    run_virtually(run())


def test_after_a_multiple_of_the_expected_wait_it_goes_to_any_backend() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        (first,) = await busy(stage)
        stage.held["long"] = {"b0": 40_000}
        bid = stage.bid("long", **LONG)
        expected_s = stage.dispatcher.look(bid).decision.wait_s
        assert expected_s is not None
        (long,) = await queued(stage, bid)
        await asyncio.sleep((PATIENCE - 0.5) * expected_s)
        assert not long.done()
        await asyncio.sleep(expected_s)
        placed = await long
        assert placed is not None
        assert placed.chosen.name == "b1"
        for each in (first, placed):
            stage.leave(each)
        stage.check()

    run_virtually(run())


def test_the_longer_the_line_at_the_holder_the_more_prompts_go_elsewhere() -> None:
    async def run() -> None:
        stage = await Stage(backends=2, slots=4).well()
        for at in range(4):
            bid = stage.bid(f"busy{at}")
            bid.avoiding = frozenset({"b1"})
            assert await stage.place(bid)
        names = [f"long{at}" for at in range(40)]
        stage.held = {name: {"b0": 40_000} for name in names}
        tasks = await queued(stage, *(stage.bid(name, prompt_tokens=40_000) for name in names))
        elsewhere = [at for at, task in enumerate(tasks) if task.done()]
        assert elsewhere
        assert elsewhere[0] > 0, "the first waits for the holder"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stage.dispatcher.check()

    run_virtually(run())


def test_worse_ranks_that_wait_for_a_backend_are_not_in_front() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        await busy(stage)
        names = [f"night{at}" for at in range(3)]
        stage.held = {name: {"b0": 40_000} for name in [*names, "chat", "later"]}
        nights = [stage.bid(name, rank=1, **LONG) for name in names]
        tasks = await queued(stage, *nights)
        waiting = sum(night.awaits == "b0" for night in nights)
        assert waiting > 0
        queue = stage.dispatcher._queues[MODEL]
        assert queue.ahead_of(stage.bid("later", rank=1, **LONG)) == {"b0": waiting}
        assert queue.ahead_of(stage.bid("chat", **LONG)) == {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stage.dispatcher.check()

    run_virtually(run())


def test_where_all_are_full_a_prompt_takes_the_next_place_of_any_if_that_is_better() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        first, second = await busy(stage, 2)
        (waiting,) = await queued(stage, stage.bid("cold", prompt_tokens=1000))
        stage.leave(second)
        await asyncio.sleep(2 * PAUSE_S)
        placed = await waiting
        assert placed is not None
        assert placed.chosen.name == "b1"
        for each in (first, placed):
            stage.leave(each)
        stage.check()

    run_virtually(run())


def test_room_that_many_do_not_want_goes_to_the_first_that_waits_for_it() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        first, second = await busy(stage, 2)
        names = [f"long{at}" for at in range(2 * MOST_FAILED_LOOKS)]
        # of as many sizes, so that each is a wish of its own
        bids = [stage.bid(name, prompt_tokens=40_000 << at) for at, name in enumerate(names)]
        stage.held = {bid.request.id: {"b0": bid.request.prompt_tokens} for bid in bids}
        stage.held["last"] = {"b1": 40_000}
        tasks = await queued(stage, *bids, stage.bid("last", **LONG))
        assert {bid.awaits for bid in bids} == {"b0"}
        stage.leave(second)
        await asyncio.sleep(20 * PAUSE_S)
        placed = await tasks.pop()
        assert placed is not None
        assert placed.chosen.name == "b1"
        assert not any(task.done() for task in tasks)
        for each in (first, placed):
            stage.leave(each)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtually(run())


def test_reports_that_make_no_room_cost_no_look() -> None:
    async def run() -> None:
        stage = await Stage(backends=2).well()
        await busy(stage, 2)
        stage.held["long"] = {"b0": 40_000}
        bid = stage.bid("long", **LONG)
        looks, decide = [], bid.decide
        bid.decide = lambda *what: (looks.append(what), decide(*what))[1]  # type: ignore[func-returns-value]
        (task,) = await queued(stage, bid)
        before = len(looks)
        for _ in range(10):
            stage.cluster.changed("b0")
            stage.cluster.changed("b1")
            await asyncio.sleep(2 * PAUSE_S)
        assert len(looks) == before
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtually(run())

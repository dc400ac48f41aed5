"""Replicas over a real Redis: what one router learns the others know, and a sick Redis fails nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from backends.fake import FakeBackend
from policies.nouns import Delta
from router.fleet.belief_news import MOST_KEYS
from router.fleet.prompt_keys import PromptKeys
from router.shared.replicas.news import Batch, encode
from router.shared.replicas.stream import AT_ONCE
from tests.policies.builders import a_request
from tests.router.shared.replicas.parts import KEY, KEYS, QUICK, TOKENS, Site, a_site, fell, some_keys
from tests.router.shared.store.parts import Line, RedisServer, a_line, a_redis
from tests.shards.attached import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.clean()


async def test_a_prompt_just_sent_by_one_router_is_followed_by_the_others(server: RedisServer) -> None:
    async with a_site(server.url, "x", tells=True) as x, a_site(server.url, "y", tells=True) as y:
        x.beliefs.sent("a", PromptKeys(KEYS))
        await eventually(lambda: y.expected() > 8)
        x.beliefs.failed("a")
        await eventually(lambda: y.expected() == 0)


async def test_what_was_sent_too_long_ago_is_not_followed(server: RedisServer) -> None:
    async with a_site(server.url, "x", tells=True) as x:
        x.beliefs.sent("a", PromptKeys(KEYS))
        x.ahead_s += 60
        x.beliefs.sent("a", PromptKeys((77,)))
        async with a_site(server.url, "y", tells=True) as y:
            await eventually(lambda: y.expected((77,)) > 0)
            assert y.expected() == 0


async def test_routers_learn_of_each_other_in_time_though_their_clocks_and_redis_drift_apart(
    server: RedisServer,
) -> None:
    async with a_site(server.url, "x", tells=True) as x, a_site(server.url, "y", tells=True) as y:
        flight = x.cluster.begin("a", a_request(), 100)
        await eventually(lambda: y.elsewhere()[1] == 1)
        for _ in range(3):
            # as after days, or when the server's clock is set
            y.ahead_s += 3600
            x.beliefs.sent("a", PromptKeys(KEYS))
            await eventually(lambda: y.expected() > 8)
            await eventually(lambda: y.elsewhere()[1] == 1)
        x.cluster.end(flight)


async def test_what_one_router_learns_all_believe(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        x.answer()
        await eventually(lambda: y.expected() > 8)
        y.ahead_s += 60  # beyond speculation
        assert y.expected() > 8
        x.answer(cached=TOKENS)
        x.answer(tuple(range(20, 30)))
        await eventually(lambda: y.expected(tuple(range(20, 30))) > 8)


async def test_a_router_hears_nothing_of_itself(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        x.answer()
        await eventually(lambda: y.expected() > 8)
        x.beliefs.forget("a")
        x.answer((99,))
        await eventually(lambda: y.expected((99,)) > 0)
        assert x.expected() == 0


async def test_backends_that_are_not_here_are_not_believed_in(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        x.beliefs.sent("elsewhere", PromptKeys(KEYS))
        x.beliefs.sent("a", PromptKeys((5,)))
        await eventually(lambda: y.expected((5,)) > 0)
        assert "elsewhere" not in y.beliefs.longest(PromptKeys(KEYS))


async def test_the_beginning_of_the_longest_prompts_is_sent(server: RedisServer) -> None:
    keys = some_keys(MOST_KEYS + 1000, seed=1)
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        x.answer(keys)
        await eventually(lambda: y.expected(keys) > MOST_KEYS / 2)
        x.answer((77,))
        await eventually(lambda: y.expected((77,)) > 0)
        y.ahead_s += 60  # beyond speculation
        assert y.expected(keys) > MOST_KEYS / 2
        assert y.expected(keys) <= MOST_KEYS


async def test_requests_under_way_elsewhere_count_until_they_end(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        first = x.cluster.begin("a", a_request(prompt_tokens=900), 900)
        second = x.cluster.begin("a", a_request(prompt_tokens=100_000), 100_000)
        first.heard(Delta(text="x"), x.now())
        await eventually(lambda: y.elsewhere() == (1, 1, 100_000))
        with_queue = y.cluster.view(y.now()).backends[0].queue_s
        assert with_queue > 0
        x.cluster.end(first)
        x.cluster.end(second)
        await eventually(lambda: y.elsewhere() == (0, 0, 0))


async def test_a_request_is_reported_once_and_not_with_every_later_change(server: RedisServer) -> None:
    many = tuple(f"own-{number}" for number in range(300))
    async with a_site(server.url, "x", backends=("a", *many)) as x, a_site(server.url, "y") as y:
        flights = [x.cluster.begin(name, a_request(), 100) for name in many]
        await all_reported(x, y)
        before = written_bytes(server)
        flights.append(x.cluster.begin("a", a_request(), 100))
        await all_reported(x, y)
        # signs of life are a few bytes
        assert written_bytes(server) - before < 500
        for flight in flights:
            x.cluster.end(flight)


async def test_a_report_that_was_lost_with_redis_is_repeated(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        flight = x.cluster.begin("a", a_request(), 100)
        await eventually(lambda: y.elsewhere()[1] == 1)
        server.stop()
        await eventually(fell(x, "gone"))
        await eventually(fell(y, "gone"))
        x.cluster.end(flight)
        server.start()
        await eventually(lambda: y.elsewhere()[1] == 0)


async def test_a_router_that_was_held_up_reports_everything_again(server: RedisServer) -> None:
    async with a_site(server.url, "y") as y:
        x = Site(server.url, "x")
        flight = x.cluster.begin("a", a_request(), 100)
        await x.replicas.turn()
        for site in (x, y):
            site.ahead_s += QUICK.silent_s + 1
        await eventually(lambda: y.elsewhere()[1] == 0)
        await x.replicas.turn()
        await eventually(lambda: y.elsewhere()[1] == 1)
        x.cluster.end(flight)
        await x.replicas.close()


async def test_a_router_that_was_held_up_counts_no_other_as_gone_before_it_has_read_everything(
    server: RedisServer,
) -> None:
    x, y = Site(server.url, "x"), Site(server.url, "y")
    flight = x.cluster.begin("a", a_request(), 100)
    await x.replicas.turn()
    await y.replicas.turn()
    for number in range(AT_ONCE):
        with server.admin() as admin:
            admin.xadd(KEY, {"by": f"z{number}", "news": encode(Batch())})
    x.cluster.end(flight)
    flight = x.cluster.begin("a", a_request(), 100)
    await x.replicas.turn()
    y.ahead_s += QUICK.silent_s
    assert await y.replicas.turn()
    assert y.elsewhere()[1] == 1
    assert not await y.replicas.turn()
    assert y.elsewhere()[1] == 1
    x.cluster.end(flight)
    await x.replicas.close()
    await y.replicas.close()


async def test_a_backend_that_joins_later_has_the_requests_of_others_at_once(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y", backends=("b",)) as y, y.cluster:
        flight = x.cluster.begin("a", a_request(), 100)
        await all_reported(x, y)
        await y.cluster.add(FakeBackend("a"))
        assert y.elsewhere()[1] == 1
        x.cluster.end(flight)


async def test_many_routers_exchange_less_often(server: RedisServer) -> None:
    often = replace(QUICK, every_s=0.02, at_full_pace=9, silent_s=1e9)
    rare = replace(often, at_full_pace=1)
    async with a_site(server.url, "x", rare) as x, a_site(server.url, "y", often) as y:
        others = [Site(server.url, f"other-{number}") for number in range(7)]
        for other in others:
            await other.replicas.turn()
        await eventually(lambda: x.replicas.routers == y.replicas.routers == 9)
        turns = x.replicas._turns, y.replicas._turns
        await eventually(lambda: y.replicas._turns >= turns[1] + 40)
        # a ninth as often, but for the time that an exchange takes on a busy machine
        assert x.replicas._turns - turns[0] < 30
        for other in others:
            await other.replicas.close()


async def all_reported(*sites: Site) -> None:
    for site in sites:
        await site.replicas.catch_up()


def written_bytes(server: RedisServer) -> int:
    with server.admin() as admin:
        return sum(len(entry[b"news"]) for _, entry in admin.xrange(KEY))  # type: ignore[union-attr]


async def test_a_router_that_falls_silent_has_nothing_under_way(server: RedisServer) -> None:
    async with a_site(server.url, "y") as y:
        x = Site(server.url, "x")
        flight = x.cluster.begin("a", a_request(), 100)
        await x.replicas.turn()
        await eventually(lambda: y.elsewhere()[1] == 1)
        assert y.replicas.routers == 2
        y.ahead_s += QUICK.silent_s
        await eventually(lambda: y.elsewhere()[1] == 0)
        assert y.replicas.routers == 1
        assert y.states[-1] == (True, 0)
        x.cluster.end(flight)
        await x.replicas.close()


async def test_a_router_that_starts_later_knows_what_was_learnt_before(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "z") as z:
        for number in range(1, 200):
            x.answer(some_keys(10, seed=number))
        await eventually(lambda: z.expected(some_keys(10, seed=199)) > 8)
        async with a_site(server.url, "y") as y:
            await eventually(lambda: y.replicas.state == "exact")
            y.ahead_s += 60
            assert y.expected(some_keys(10, seed=1)) > 8


async def test_without_redis_a_router_starts_approximate_and_is_exact_when_it_comes(server: RedisServer) -> None:
    server.stop()
    async with a_site(server.url, "x") as x:
        assert x.replicas.state == "approximate"
        x.answer()
        assert x.expected() > 8
        server.start()
        await eventually(lambda: x.replicas.is_exact)
        assert "replicas_back" in x.events
        async with a_site(server.url, "y") as y:
            await eventually(lambda: y.expected() > 8)


async def test_a_redis_that_was_restarted_empty_is_taken_up_again(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        x.answer()
        await eventually(lambda: y.expected() > 8)
        server.stop()
        await eventually(fell(x, "gone"))
        await eventually(fell(y, "gone"))
        x.answer((7, 8, 9))
        server.start()
        await eventually(lambda: y.expected((7, 8, 9)) > 2)


async def test_a_stream_that_begins_anew_with_smaller_numbers_is_read_from_its_beginning(server: RedisServer) -> None:
    async with a_site(server.url, "y") as y:
        with server.admin() as admin:
            admin.xadd(KEY, {"by": "z", "news": b""})
        await eventually(lambda: "replicas_unreadable" in y.events)
        server.stop()
        await eventually(fell(y, "gone"))
        server.start()
        with server.admin() as admin:
            # as a server numbers it after its clock was set back
            admin.xadd(KEY, {"by": "z", "news": b""}, id="5-0")
        await eventually(lambda: "replicas_forgotten" in y.events)
        await eventually(lambda: y.events.count("replicas_unreadable") == 2)


async def test_while_redis_is_away_what_was_learnt_is_believed_less_but_not_forgotten(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x:
        x.answer()
        x.ahead_s += 60
        before = x.expected()
        server.stop()
        await eventually(fell(x, "gone"))
        x.ahead_s += 120
        await eventually(lambda: x.expected() < 0.6 * before)
        assert x.expected() > 0.4 * before
        server.start()
        await eventually(lambda: x.expected() > 0.9 * before)


async def test_unsent_news_are_kept_within_a_bound(server: RedisServer) -> None:
    server.stop()
    async with a_site(server.url, "x") as x:
        for number in range(QUICK.most_kept + 12):
            x.beliefs.sent("a", PromptKeys((number + 1,)))
        x.replicas.check()
        assert x.events.count("replicas_news_dropped") == 12
        server.start()
        await eventually(lambda: x.replicas.is_exact)


@asynccontextmanager
async def a_site_on_a_line(server: RedisServer) -> AsyncIterator[tuple[Site, Line]]:
    async with a_line(server) as line, a_site(line.url, "x") as site:
        assert site.replicas.is_exact
        yield site, line


async def test_a_slow_redis_holds_nothing_up(server: RedisServer) -> None:
    async with a_site_on_a_line(server) as (x, line):
        line.delay_s = 1.0
        await eventually(fell(x, "slow"))
        x.answer()
        assert x.expected() > 4
        line.mend()
        await eventually(lambda: x.replicas.is_exact)


async def test_a_router_that_caught_up_was_read_and_has_read_all_earlier_news(server: RedisServer) -> None:
    async with a_site(server.url, "x", tells=True) as x, a_site(server.url, "y", tells=True) as y:
        for number in range(5):
            keys = tuple(range(100 * number + 1, 100 * number + 11))
            x.beliefs.sent("a", PromptKeys(keys))
            await x.replicas.catch_up()
            await y.replicas.catch_up()
            assert y.expected(keys) > 8


async def test_catching_up_does_not_wait_while_redis_is_away(server: RedisServer) -> None:
    async with a_site_on_a_line(server) as (x, line):
        line.delay_s = 10.0
        # once until it is seen that nothing comes, then not at all
        await asyncio.wait_for(x.replicas.catch_up(), 5)
        await eventually(fell(x, "slow"))
        waiting = asyncio.create_task(x.replicas.catch_up())
        await asyncio.sleep(0)
        assert waiting.done()


@pytest.mark.parametrize("lie", [b"*2\r\n+hello\r\n:7\r\n", b":1\r\n:2\r\n:3\r\n:4\r\n", b"!?\r\n", b"+OK\r\n" * 3])
async def test_a_redis_that_answers_nonsense_is_not_believed(server: RedisServer, lie: bytes) -> None:
    async with a_site_on_a_line(server) as (x, line):
        line.instead = lie
        await eventually(lambda: not x.replicas.is_exact)
        x.answer()
        line.cut()
        line.mend()
        await eventually(lambda: x.replicas.is_exact)


async def test_a_full_redis_is_read_while_it_cannot_be_written(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        with server.admin() as admin:
            admin.config_set("maxmemory", 1)
            x.answer()
            await eventually(fell(x, "full"))
            admin.config_set("maxmemory", 0)
        await eventually(lambda: y.expected() > 8)
        await eventually(lambda: x.replicas.is_exact)


async def test_entries_of_others_are_passed_over(server: RedisServer) -> None:
    async with a_site(server.url, "x") as x, a_site(server.url, "y") as y:
        with server.admin() as admin:
            deep = b"\x93\x90\xc0" + 5000 * b"\x91" + b"\xc0"
            others = [{"by": "z", "news": news} for news in (b"\xff", b"\x93\x01\x02\x03", deep)]
            for entry in (*others, {"other": "thing"}):
                admin.xadd(KEY, entry)  # type: ignore[arg-type]
        x.answer()
        await eventually(lambda: y.expected() > 8)
        assert y.events.count("replicas_unreadable") == 4
        assert y.replicas.is_exact


async def test_a_key_of_another_kind_is_a_fault_and_not_an_end(server: RedisServer) -> None:
    with server.admin() as admin:
        admin.set(KEY, "mine")
        async with a_site(server.url, "x") as x:
            assert fell(x, "refusing")()
            admin.delete(KEY)
            await eventually(lambda: x.replicas.is_exact)


async def test_a_stream_without_writers_expires(server: RedisServer) -> None:
    async with a_site(server.url, "x"):
        pass
    with server.admin() as admin:
        assert 0 < admin.ttl(KEY) <= 3600

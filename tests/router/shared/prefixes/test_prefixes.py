"""Prefixes: on distinct backends, for a time, within a limit, made again where they were lost, known to all routers."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from msgspec.structs import replace

from backends.fake import FakeBackend
from policies.errors import BackendFailed, ExpectedError, InvalidRequest, QuotaExceeded, UnknownPrefix
from policies.nouns import Tenant
from router.shared.prefixes.prefix import Dropped, Place, Prefix, prefix_id
from tests.router.shared.prefixes.parts import ACME, KEYS, LABS, TOKENS, a_bench
from tests.shards.attached import eventually

PIN = f"acme/{prefix_id(KEYS)}"


async def test_a_prefix_is_computed_and_pinned_on_as_many_backends_as_asked_for() -> None:
    async with a_bench() as bench:
        prefix = await bench.keep(shards=2, ttl_s=60.0)
        assert (prefix.state, prefix.tokens, prefix.expires_at) == ("ready", TOKENS, 1060.0)
        places = {Place(name, "fake", TOKENS, TOKENS, can_pin=True) for name in ("b0", "b1")}
        assert set(prefix.places) == places
        assert bench.backends["b0"].pinned == {PIN: (KEYS, 60.0)}
        assert bench.backends["b2"].pinned == {}


async def test_the_backends_compute_side_by_side() -> None:
    async with a_bench() as bench:
        bench.warmer.gate.clear()
        keeping = asyncio.create_task(bench.keep(shards=3))
        await eventually(lambda: bench.warmer.computing == 3)
        assert bench.prefixes.of("acme")[0].state == "warming"
        bench.warmer.gate.set()
        assert len((await keeping).places) == 3


async def test_a_caller_that_does_not_wait_learns_that_it_is_warming() -> None:
    async with a_bench() as bench:
        assert (await bench.keep(waits=False)).state == "warming"
        await eventually(lambda: bench.prefixes.of("acme")[0].state == "ready")


async def test_warming_continues_after_its_client_disconnects() -> None:
    async with a_bench() as bench:
        bench.warmer.gate.clear()
        keeping = asyncio.create_task(bench.keep())
        await eventually(lambda: bench.warmer.computing == 1)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        bench.warmer.gate.set()
        await eventually(lambda: bench.prefixes.of("acme")[0].state == "ready")


async def test_fewer_backends_than_requested_make_it_partial_with_the_reason() -> None:
    async with a_bench(FakeBackend("b0", pins=True)) as bench:
        prefix = await bench.keep(shards=2)
        assert (prefix.state, prefix.trouble, prefix.backends) == ("partial", "none is left", {"b0"})


async def test_the_shown_error_has_a_bounded_length() -> None:
    async with a_bench() as bench:
        await bench.keep()
        bench.warmer.failure = InvalidRequest("broken " * 1000)
        assert len((await bench.keep(shards=2)).trouble) == 500


async def test_what_no_backend_computes_is_refused_and_leaves_nothing() -> None:
    async with a_bench() as bench:
        bench.warmer.failure = BackendFailed("broken")
        with pytest.raises(BackendFailed, match="broken"):
            await bench.keep()
        assert bench.prefixes.of() == []
        assert isinstance(bench.shared[-1], Dropped)
        assert bench.shared[-1].key == ("acme", prefix_id(KEYS))


async def test_two_requests_at_once_for_a_prefix_that_no_backend_computes_get_the_same_error() -> None:
    async with a_bench() as bench:
        bench.warmer.failure = BackendFailed("broken")
        results = await asyncio.gather(bench.keep(), bench.keep(), return_exceptions=True)
        assert list(map(str, results)) == ["broken", "broken"]
        assert bench.prefixes.of() == []


async def test_a_backend_that_cannot_pin_is_warmed_all_the_same() -> None:
    async with a_bench(FakeBackend("b0")) as bench:
        prefix = await bench.keep()
        assert prefix.places == (Place("b0", "fake", TOKENS, 0),)
        assert prefix.state == "ready"
        # its eviction cannot be known, so it is not computed again
        bench.pass_s(100.0)
        await bench.turn()
        assert bench.warmer.warmed == [("acme", "b0")]


async def test_a_backend_without_room_for_the_pin_is_avoided_if_another_has_some() -> None:
    async with a_bench(FakeBackend("b0", pins=True, most_pinned=9), FakeBackend("b1", pins=True)) as bench:
        assert (await bench.keep()).backends == {"b1"}
        prefix = await bench.keep(shards=2)
        held = {place.backend: (place.held_tokens, place.pinned_tokens) for place in prefix.places}
        assert held == {"b1": (TOKENS, TOKENS), "b0": (TOKENS, 9 * 64)}


async def test_what_is_evicted_before_the_pin_is_there_is_computed_again() -> None:
    async with a_bench() as bench:
        bench.warmer.evicts = [4, 2]
        (place,) = (await bench.keep()).places
        assert (place.held_tokens, place.pinned_tokens) == (TOKENS, TOKENS)
        assert bench.warmer.warmed == [("acme", "b0")] * 3


async def test_another_request_prolongs_it_under_the_same_name() -> None:
    async with a_bench() as bench:
        first = await bench.keep(ttl_s=60.0)
        bench.pass_s(30.0)
        again = await bench.keep(ttl_s=60.0)
        assert (again.id, again.created_at, again.expires_at) == (first.id, 1000.0, 1090.0)
        assert bench.backends["b0"].pinned == {PIN: (KEYS, 60.0)}
        assert bench.warmer.warmed == [("acme", "b0")]
        assert (await bench.keep(ttl_s=5.0)).expires_at == 1090.0
        assert (await bench.keep(shards=2)).backends == {"b0", "b1"}


async def test_two_requests_at_once_have_it_computed_once() -> None:
    async with a_bench() as bench:
        first, second = await asyncio.gather(bench.keep(), bench.keep())
        assert first == second
        assert bench.warmer.warmed == [("acme", "b0")]


async def test_its_time_ends_it() -> None:
    async with a_bench() as bench:
        prefix = await bench.keep(ttl_s=60.0)
        bench.pass_s(60.0)
        with pytest.raises(UnknownPrefix):
            bench.prefixes.get("acme", prefix.id)
        assert bench.prefixes.of() == []


async def test_a_dropped_one_is_unpinned_everywhere() -> None:
    async with a_bench() as bench:
        prefix = await bench.keep(shards=2)
        assert await bench.prefixes.drop("acme", prefix.id) == prefix
        assert all(not backend.pinned for backend in bench.backends.values())
        with pytest.raises(UnknownPrefix):
            await bench.prefixes.drop("acme", prefix.id)


async def test_a_domain_is_dropped_whatever_its_tenant_drops_meanwhile() -> None:
    async with a_bench() as bench:
        bench.warmer.prompts["another"] = tuple(range(101, 105))
        first, second = await bench.keep(), await bench.keep("another")
        dropping = asyncio.create_task(bench.prefixes.drop_domain("acme"))
        await asyncio.sleep(0)
        with suppress(UnknownPrefix):
            await bench.prefixes.drop("acme", second.id)
        assert await dropping == [first, second]
        assert not any(backend.pinned for backend in bench.backends.values())


async def test_a_backend_that_cannot_be_reached_does_not_keep_one_from_being_dropped() -> None:
    async with a_bench() as bench:
        prefix = await bench.keep()
        bench.backends["b0"].is_well = False
        await bench.prefixes.drop("acme", prefix.id)
        assert bench.prefixes.of() == []


async def test_what_is_dropped_while_it_warms_is_computed_no_further() -> None:
    async with a_bench() as bench:
        bench.warmer.gate.clear()
        keeping = asyncio.create_task(bench.keep())
        await eventually(lambda: bench.warmer.computing == 1)
        await bench.prefixes.drop("acme", prefix_id(KEYS))
        with pytest.raises(UnknownPrefix):
            await keeping
        assert bench.backends["b0"].pinned == {}


async def test_a_tenant_keeps_no_more_than_its_limit_and_no_other_pays_for_it() -> None:
    async with a_bench() as bench:
        bench.warmer.prompts["another"] = tuple(range(101, 113))
        await bench.keep(shards=3)
        with pytest.raises(QuotaExceeded, match="2,688 tokens of prefixes, more than 2,560"):
            await bench.keep("another")
        assert len(bench.prefixes.of("acme")) == 1
        await bench.keep("another", LABS)
        assert [prefix.tenant for prefix in bench.prefixes.of()] == ["acme", "labs"]
        assert bench.prefixes.of("labs")[0].tokens == 12 * 64


async def test_no_tenant_sees_or_drops_another_tenants_prefix() -> None:
    async with a_bench() as bench:
        prefix = await bench.keep()
        with pytest.raises(UnknownPrefix):
            bench.prefixes.get("labs", prefix.id)
        with pytest.raises(UnknownPrefix):
            await bench.prefixes.drop("labs", prefix.id)


async def test_equal_prompts_of_tenants_that_share_a_cache_are_pinned_apart() -> None:
    async with a_bench() as bench:
        other = Tenant("labs", domain="acme")
        await bench.keep()
        prefix = await bench.keep(tenant=other)
        await bench.prefixes.drop("labs", prefix.id)
        assert bench.backends["b0"].pinned.keys() == {PIN}


async def test_a_backend_that_stays_away_is_replaced_by_another() -> None:
    async with a_bench() as bench:
        await bench.keep()
        await bench.fall_ill("b0")
        bench.pass_s(5.0)
        await bench.turn()
        assert bench.prefixes.of()[0].backends == {"b0"}
        bench.pass_s(6.0)
        await bench.turn()
        (prefix,) = bench.prefixes.of()
        assert (prefix.state, prefix.backends) == ("ready", {"b1"})
        assert bench.backends["b1"].pinned == {PIN: (KEYS, 589.0)}


async def test_a_backend_that_lost_its_cache_computes_it_again() -> None:
    async with a_bench(FakeBackend("b0", pins=True)) as bench:
        await bench.keep()
        await bench.fall_ill("b0")
        await bench.come_back("b0")
        await bench.turn()
        (prefix,) = bench.prefixes.of()
        assert (prefix.state, prefix.backends) == ("ready", {"b0"})
        assert bench.warmer.warmed == [("acme", "b0")] * 2


async def test_one_that_the_index_forgot_and_the_backend_did_not_is_only_asked_about() -> None:
    async with a_bench() as bench:
        await bench.keep()
        bench.index.clear("b0")
        await bench.turn()
        assert bench.prefixes.of()[0].backends == {"b0"}
        assert bench.warmer.warmed == [("acme", "b0")]


async def test_a_draining_backend_is_replaced_at_once() -> None:
    async with a_bench() as bench:
        await bench.keep()
        bench.cluster.drain("b0")
        await bench.turn()
        assert bench.prefixes.of()[0].backends == {"b1"}


async def test_a_prefix_that_cannot_be_restored_is_lost_with_the_reason_and_retried_ever_less_often() -> None:
    async with a_bench(FakeBackend("b0", pins=True)) as bench:
        await bench.keep()
        bench.cluster.drain("b0")
        tries = []
        for _ in range(60):
            before = [news for news in bench.shared if isinstance(news, Prefix) and news.is_warming]
            await bench.turn()
            after = [news for news in bench.shared if isinstance(news, Prefix) and news.is_warming]
            if len(after) > len(before):
                tries.append(bench.now - 1000.0)
            bench.pass_s(1.0)
        (prefix,) = bench.prefixes.of()
        assert (prefix.state, prefix.trouble) == ("lost", "none is left")
        assert tries == [0.0, 5.0, 15.0, 35.0, 55.0]
        bench.cluster.drain("b0", False)
        bench.pass_s(20.0)
        await bench.turn()
        assert bench.prefixes.of()[0].state == "ready"


async def test_other_routers_hear_of_it_list_it_and_count_it() -> None:
    async with a_bench() as bench, a_bench(by="r2") as other:
        prefix = await bench.keep(shards=3)
        for news in bench.shared:
            other.prefixes.hear(news)
        assert other.prefixes.get("acme", prefix.id) == bench.prefixes.get("acme", prefix.id)
        other.warmer.prompts["another"] = tuple(range(101, 113))
        with pytest.raises(QuotaExceeded):
            await other.keep("another")


async def test_any_router_can_drop_it_and_none_makes_it_again() -> None:
    async with a_bench() as bench, a_bench(by="r2") as other:
        prefix = await bench.keep()
        for news in bench.shared:
            other.prefixes.hear(news)
        await other.prefixes.drop("acme", prefix.id)
        bench.prefixes.hear(other.shared[-1])
        await eventually(lambda: not bench.backends["b0"].pinned)
        assert bench.prefixes.of() == []
        # news from before the drop come late
        other.prefixes.hear(bench.shared[-1])
        assert other.prefixes.of() == []


async def test_an_unmaintained_prefix_is_shown_with_what_is_left_and_the_remedy() -> None:
    async with a_bench() as bench, a_bench(by="r2") as other:
        prefix = await bench.keep(shards=2)
        other.prefixes.hear(bench.shared[-1])
        for name in ("b0", "b1"):
            other.index.store(name, KEYS)
        other.pass_s(89.0)
        assert other.prefixes.of() == [prefix]
        other.pass_s(1.0)
        (shown,) = other.prefixes.of()
        assert (shown.state, shown.backends) == ("ready", {"b0", "b1"})
        assert "POST it again" in shown.trouble
        other.index.clear("b1")
        assert other.prefixes.get("acme", prefix.id).state == "partial"
        other.cluster.drain("b0")
        assert other.prefixes.get("acme", prefix.id).state == "lost"
        assert (await other.keep(shards=2)).trouble == ""
        assert other.prefixes.of()[0].state == "ready"


async def test_an_unmaintained_prefix_is_unpinned_wherever_it_was() -> None:
    async with a_bench() as bench, a_bench(*bench.backends.values(), by="r2") as other:
        prefix = await bench.keep(shards=2)
        other.prefixes.hear(bench.shared[-1])
        other.pass_s(90.0)
        assert other.prefixes.of()[0].state == "lost"
        await other.prefixes.drop("acme", prefix.id)
        assert not any(backend.pinned for backend in bench.backends.values())


@pytest.mark.parametrize("seed", range(8))
async def test_routers_that_hear_the_same_in_any_order_know_the_same(seed: int) -> None:
    rng = random.Random(seed)
    all_news: list[Prefix | Dropped] = []
    for version in range(1, 13):
        key = rng.choice([("acme", "prefix-1"), ("labs", "prefix-1"), ("acme", "prefix-2")])
        if rng.random() < 0.4:
            all_news.append(Dropped(*key, version))
        else:
            item = Prefix(key[1], key[0], "fake", key[0], 64, 1, 1000.0, 2000.0, rng.choice("abc"), version=version)
            all_news += [item, replace(item, changed_at=1000.0 + rng.random(), is_warming=True)]
    async with a_bench() as bench, a_bench(by="r2") as other:
        for news in all_news:
            bench.prefixes.hear(news)
        rng.shuffle(all_news)
        for news in all_news:
            other.prefixes.hear(news)
        assert bench.prefixes.of() == other.prefixes.of()


async def test_late_news_of_a_dropped_prefix_are_taken_back() -> None:
    async with a_bench() as bench, a_bench(by="r2") as other:
        prefix = await bench.keep()
        other.prefixes.hear(bench.shared[-1])
        dropped = await other.prefixes.drop("acme", prefix.id), other.shared[-1]
        # it hears again of what was dropped longer ago than it remembers
        other.pass_s(60.0)
        other.prefixes.hear(bench.shared[-1])
        assert other.prefixes.of() == [dropped[0]]
        bench.prefixes.hear(dropped[1])
        other.prefixes.hear(bench.shared[-1])
        assert other.prefixes.of() == []


async def test_a_pin_that_could_not_be_prolonged_is_prolonged_when_its_backend_answers() -> None:
    async with a_bench() as bench:
        await bench.keep(ttl_s=60.0)
        bench.backends["b0"].is_well = False
        assert (await bench.keep(ttl_s=600.0)).expires_at == 1600.0
        bench.backends["b0"].is_well = True
        bench.pass_s(5.0)
        await bench.turn()
        assert bench.backends["b0"].pinned == {PIN: (KEYS, 595.0)}
        await bench.turn()
        assert bench.prefixes.of()[0].state == "ready"


async def test_the_router_that_was_asked_last_maintains_it() -> None:
    async with a_bench() as bench, a_bench(by="r2") as other:
        await bench.keep()
        for news in bench.shared:
            other.prefixes.hear(news)
        other.clock[0] = 900.0
        await other.keep()
        for news in other.shared:
            bench.prefixes.hear(news)
        bench.cluster.drain("b0")
        await bench.turn()
        assert bench.prefixes.of()[0].backends == {"b0"}
        other.cluster.drain("b0")
        await other.turn()
        assert other.prefixes.of()[0].backends == {"b1"}


async def test_many_prefixes_are_repeated_a_few_at_a_time() -> None:
    async with a_bench(most_sent=2) as bench:
        names = {f"text {number}": (number,) for number in range(1, 6)}
        bench.warmer.prompts |= names
        ids = {(await bench.keep(name)).id for name in names}
        bench.pass_s(30.0)
        sent: list[list[str]] = []
        for _ in range(4):
            bench.shared.clear()
            await bench.turn()
            sent.append([news.id for news in bench.shared])
        assert [len(names) for names in sent] == [2, 2, 1, 0]
        assert {name for names in sent for name in names} == ids


async def test_of_many_that_were_lost_a_few_are_made_again_at_a_time() -> None:
    async with a_bench(most_mended=2) as bench:
        bench.warmer.prompts |= {f"text {number}": (number,) for number in range(1, 6)}
        for name in list(bench.warmer.prompts):
            await bench.keep(name)
        await bench.fall_ill("b0")
        bench.pass_s(11.0)
        bench.warmer.gate.clear()
        for _ in range(2):
            await bench.prefixes.turn()
            await eventually(lambda: bench.warmer.computing == 2)
        bench.warmer.gate.set()
        for _ in range(3):
            await bench.turn()
        assert {prefix.backends for prefix in bench.prefixes.of()} == {frozenset({"b1"})}


async def test_it_is_repeated_for_routers_that_came_later() -> None:
    async with a_bench() as bench, a_bench(by="r2") as late:
        await bench.keep()
        bench.shared.clear()
        bench.pass_s(29.0)
        await bench.turn()
        assert bench.shared == []
        bench.pass_s(1.0)
        await bench.turn()
        for news in bench.shared:
            late.prefixes.hear(news)
        assert len(late.prefixes.of("acme")) == 1


async def test_a_router_never_knows_more_than_it_may() -> None:
    async with a_bench(most_known=1) as bench:
        bench.prefixes.hear(Prefix("prefix-1", "labs", "fake", "labs", 64, 1, 1000.0, 2000.0))
        bench.prefixes.hear(Prefix("prefix-2", "labs", "fake", "labs", 64, 1, 1000.0, 2000.0))
        assert [prefix.id for prefix in bench.prefixes.of()] == ["prefix-1"]
        with pytest.raises(QuotaExceeded, match="are kept already"):
            await bench.keep()


async def test_all_of_a_domain_are_dropped_together() -> None:
    async with a_bench() as bench:
        await bench.keep()
        await bench.keep(tenant=LABS)
        dropped = await bench.prefixes.drop_domain("acme")
        assert [prefix.tenant for prefix in dropped] == ["acme"]
        assert [prefix.tenant for prefix in bench.prefixes.of()] == ["labs"]


async def test_a_failure_of_another_kind_than_planned_ends_no_router() -> None:
    async with a_bench() as bench:
        bench.warmer.failure = ExpectedError("the router made a mistake")
        with pytest.raises(ExpectedError):
            await bench.keep()
        bench.warmer.failure = None
        assert (await bench.keep()).state == "ready"


def test_the_limit_of_a_tenant_counts_every_backend() -> None:
    prefix = Prefix("prefix-1", ACME.name, "fake", "acme", TOKENS, 3, 0.0, 1.0)
    assert prefix.charge == 3 * TOKENS

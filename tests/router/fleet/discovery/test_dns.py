"""Names are asked of a real server over UDP, by the resolver that the router uses."""

from __future__ import annotations

from contextlib import aclosing
from types import SimpleNamespace

import dns.asyncresolver
import pytest

from policies.sla.sources import DnsName, SrvName
from router.fleet.discovery.dns import DnsSource, SrvSource
from router.fleet.discovery.source import Addresses, SourceFailed
from tests.standins.name_server import AAAA, A, NameServer, a_name_server


def a_resolver(server: NameServer) -> dns.asyncresolver.Resolver:
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], server.port
    resolver.timeout, resolver.lifetime = 0.1, 0.3
    return resolver


async def first(source: DnsSource | SrvSource) -> Addresses:
    async with aclosing(source.addresses()) as answers:
        return await anext(answers)


async def test_a_name_has_all_its_addresses_of_both_families() -> None:
    async with a_name_server(hosts={"shards.example": ["10.0.0.1", "10.0.0.2", "fd00::7"]}) as server:
        found = await first(DnsSource(DnsName("shards.example", 9000), a_resolver(server)))
        assert found == {"10.0.0.1:9000", "10.0.0.2:9000", "[fd00::7]:9000"}
        assert server.asked == [("shards.example", A), ("shards.example", AAAA)]


async def test_a_name_is_asked_for_again_when_its_records_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def waited(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("router.fleet.discovery.dns.asyncio", SimpleNamespace(sleep=waited))
    async with a_name_server(hosts={"shards.example": ["10.0.0.1"]}) as server:
        answers = DnsSource(DnsName("shards.example", 9000), a_resolver(server)).addresses()
        assert await anext(answers) == {"10.0.0.1:9000"}
        server.hosts["shards.example"] = ["10.0.0.2"]
        assert await anext(answers) == {"10.0.0.2:9000"}
        assert waits == [server.ttl_s]
        await answers.aclose()


async def test_a_name_that_does_not_exist_or_has_no_address_is_empty() -> None:
    async with a_name_server(hosts={"empty.example": []}) as server:
        for name in ("empty.example", "nobody.example"):
            assert await first(DnsSource(DnsName(name, 1), a_resolver(server))) == frozenset()


@pytest.mark.parametrize("trouble", ["fails", "is_silent"])
async def test_a_failing_or_silent_dns_server_does_not_change_the_name(trouble: str) -> None:
    async with a_name_server(hosts={"shards.example": ["10.0.0.1"]}, **{trouble: True}) as server:
        with pytest.raises(SourceFailed, match=r"A of shards\.example"):
            await first(DnsSource(DnsName("shards.example", 9000), a_resolver(server)))


async def test_a_dns_server_that_fails_for_one_version_of_addresses_still_gives_the_other() -> None:
    hosts = {"shards.example": ["10.0.0.1", "fd00::7"], "four.example": ["10.0.0.1"]}
    async with a_name_server(hosts=hosts, fails_for=frozenset({AAAA})) as server:
        assert await first(DnsSource(DnsName("four.example", 1), a_resolver(server))) == {"10.0.0.1:1"}
        server.fails_for = frozenset()
        answers = DnsSource(DnsName("shards.example", 9000), a_resolver(server)).addresses()
        assert len(await anext(answers)) == 2
        # what it does not tell for now is not gone
        server.fails_for = frozenset({A})
        server.hosts["shards.example"] = ["fd00::8"]
        assert await anext(answers) == {"10.0.0.1:9000", "[fd00::8]:9000"}
        await answers.aclose()


async def test_a_dns_server_that_begins_to_fail_for_both_versions_is_reported() -> None:
    async with a_name_server(hosts={"shards.example": ["10.0.0.1"]}) as server:
        answers = DnsSource(DnsName("shards.example", 9000), a_resolver(server)).addresses()
        assert await anext(answers) == {"10.0.0.1:9000"}
        server.fails = True
        with pytest.raises(SourceFailed, match=r"A of shards\.example"):
            await anext(answers)


async def test_srv_records_name_hosts_and_ports_and_the_best_priority_counts() -> None:
    records = [(0, 1, 7001, "a.example."), (0, 9, 7002, "b.example."), (5, 1, 7003, "c.example.")]
    hosts = {"a.example": ["10.0.0.1"], "b.example": ["10.0.0.2", "fd00::2"], "c.example": ["10.0.0.3"]}
    async with a_name_server(services={"_grpc._tcp.shards.example": records}, hosts=hosts) as server:
        found = await first(SrvSource(SrvName("_grpc._tcp.shards.example"), a_resolver(server)))
        assert found == {"10.0.0.1:7001", "10.0.0.2:7002", "[fd00::2]:7002"}


async def test_a_lone_dot_means_that_there_is_no_such_service() -> None:
    async with a_name_server(services={"_x._tcp.example": [(0, 0, 0, ".")]}) as server:
        assert await first(SrvSource(SrvName("_x._tcp.example"), a_resolver(server))) == frozenset()

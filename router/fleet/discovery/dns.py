"""Backends behind a name: its A and AAAA records, or the hosts and ports of its SRV records (RFC 1035, RFC 2782)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver

from policies.sla.sources import DnsName, SrvName
from router.fleet.discovery.source import Addresses, SourceFailed

_SHORTEST_S, _LONGEST_S = 1.0, 30.0
"""A name is looked up again when its records expire, within these bounds."""

_ANSWER_S = 5.0


def system_resolver() -> dns.asyncresolver.Resolver:
    """A resolver with this machine's name servers and search domains. Raises SourceFailed if there are none."""
    try:
        resolver = dns.asyncresolver.Resolver()
    except (dns.exception.DNSException, OSError) as error:
        raise SourceFailed(f"this machine has no name server: {error}") from error
    resolver.lifetime = _ANSWER_S
    return resolver


class DnsSource:
    """Every address of a name, at one port."""

    patience_s = 30.0

    def __init__(self, at: DnsName, resolver: dns.asyncresolver.Resolver | None = None) -> None:
        self._at, self._lookup = at, _Lookup(resolver)

    async def addresses(self) -> AsyncGenerator[Addresses]:
        while True:
            hosts, ttl_s = await self._lookup.hosts(self._at.name)
            yield frozenset(f"{host}:{self._at.port}" for host in hosts)
            await asyncio.sleep(ttl_s)


class SrvSource:
    """Every host and port with the best priority in a name's SRV records; their weights are ignored."""

    patience_s = 30.0

    def __init__(self, at: SrvName, resolver: dns.asyncresolver.Resolver | None = None) -> None:
        self._at, self._lookup = at, _Lookup(resolver)

    async def addresses(self) -> AsyncGenerator[Addresses]:
        while True:
            places, ttl_s = await self._lookup.services(self._at.name)
            found: set[str] = set()
            for target, port in places:
                hosts, host_ttl_s = await self._lookup.hosts(target)
                found |= {f"{host}:{port}" for host in hosts}
                ttl_s = min(ttl_s, host_ttl_s)
            yield frozenset(found)
            await asyncio.sleep(ttl_s)


class _Lookup:
    """DNS look-ups. The resolver is made when it is first needed: a router starts without one."""

    def __init__(self, resolver: dns.asyncresolver.Resolver | None) -> None:
        self._resolver = resolver
        self._known: dict[tuple[str, str], list[Any]] = {}

    async def hosts(self, name: str) -> tuple[set[str], float]:
        """The IP addresses of `name`, IPv6 in brackets, and their remaining seconds.

        Some name servers fail for the IP version without records: that version's last answer then stays. Raises
        SourceFailed if that leaves nothing, or if they fail for both.
        """
        hosts, holds_s = set[str](), _LONGEST_S
        failures: list[SourceFailed] = []
        for kind, shown in (("A", "{}"), ("AAAA", "[{}]")):
            try:
                self._known[name, kind], kind_s = await self._ask(name, kind)
            except SourceFailed as failed:
                failures.append(failed)
                kind_s = _SHORTEST_S
            hosts |= {shown.format(record.address) for record in self._known.get((name, kind), ())}
            holds_s = min(holds_s, kind_s)
        if len(failures) == 2 or (failures and not hosts):
            raise failures[0]
        return hosts, holds_s

    async def services(self, name: str) -> tuple[set[tuple[str, int]], float]:
        """The (host, port) pairs of the best priority, and their remaining seconds."""
        records, ttl_s = await self._ask(name, "SRV")
        best = min((record.priority for record in records), default=0)
        targets = {record.target.to_text() for record in records}
        self._known = {(host, kind): known for (host, kind), known in self._known.items() if host in targets}
        # a lone "." means that there is no such service (RFC 2782)
        return {
            (record.target.to_text(), record.port)
            for record in records
            if record.priority == best and record.target.to_text() != "."
        }, ttl_s

    async def _ask(self, name: str, kind: str) -> tuple[list[Any], float]:
        """The records of `name` of this kind, and their remaining seconds. Raises SourceFailed."""
        if self._resolver is None:
            self._resolver = system_resolver()
        try:
            answer = await self._resolver.resolve(name, kind, search=True, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return [], _SHORTEST_S
        except (dns.exception.DNSException, OSError) as error:
            raise SourceFailed(f"{kind} of {name}: {error}") from error
        if answer.rrset is None:
            # it has records of another kind only; look again for this kind at long intervals
            return [], _LONGEST_S
        return list(answer.rrset), min(_LONGEST_S, max(_SHORTEST_S, float(answer.rrset.ttl)))

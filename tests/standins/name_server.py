"""A name server for tests: answers A, AAAA and SRV over UDP from a table. Written after RFC 1035 and RFC 2782."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

A, AAAA, SRV = 1, 28, 33
NO_ERROR, SERVER_FAILURE, NAME_ERROR = 0, 2, 3
_IN = 1
_IS_ANSWER, _IS_AUTHORITATIVE = 0x8000, 0x0400


@dataclass(eq=False)
class NameServer(asyncio.DatagramProtocol):
    """`hosts`: name -> IP addresses; `services`: name -> (priority, weight, port, target).

    A name in neither does not exist. `fails` answers with SERVFAIL, `is_silent` not at all, `fails_for` types of
    record with SERVFAIL. `asked` has (name, type).
    """

    hosts: dict[str, list[str]] = field(default_factory=dict)
    services: dict[str, list[tuple[int, int, int, str]]] = field(default_factory=dict)
    ttl_s: int = 1
    fails: bool = False
    is_silent: bool = False
    fails_for: frozenset[int] = frozenset()
    asked: list[tuple[str, int]] = field(default_factory=list)
    port: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        number, _, questions = struct.unpack_from("!HHH", data)
        assert questions == 1
        name, end = _read_name(data, 12)
        kind, _ = struct.unpack_from("!HH", data, end)
        self.asked.append((name, kind))
        if not self.is_silent:
            self._transport.sendto(self._answer(number, data[12 : end + 4], name, kind), address)

    def _answer(self, number: int, question: bytes, name: str, kind: int) -> bytes:
        known = name in self.hosts or name in self.services
        code = SERVER_FAILURE if self.fails or kind in self.fails_for else NO_ERROR if known else NAME_ERROR
        records = self._records(name, kind) if code == NO_ERROR else []
        flags = _IS_ANSWER | _IS_AUTHORITATIVE | code
        head = struct.pack("!HHHHHH", number, flags, 1, len(records), 0, 0)
        # 0xC00C points at the name in the question
        bodies = (struct.pack("!HHHIH", 0xC00C, kind, _IN, self.ttl_s, len(record)) + record for record in records)
        return head + question + b"".join(bodies)

    def _records(self, name: str, kind: int) -> list[bytes]:
        if kind == SRV:
            return [
                struct.pack("!HHH", priority, weight, port) + _written(target)
                for priority, weight, port, target in self.services.get(name, [])
            ]
        version = {A: 4, AAAA: 6}[kind]
        addresses = map(ipaddress.ip_address, self.hosts.get(name, []))
        return [address.packed for address in addresses if address.version == version]


@asynccontextmanager
async def a_name_server(**records: object) -> AsyncIterator[NameServer]:
    """One that listens on a port of 127.0.0.1."""
    server = NameServer(**records)  # type: ignore[arg-type]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()


def _read_name(data: bytes, at: int) -> tuple[str, int]:
    labels: list[str] = []
    while length := data[at]:
        labels.append(data[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), at + 1


def _written(name: str) -> bytes:
    labels = [label for label in name.rstrip(".").split(".") if label]
    return b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"

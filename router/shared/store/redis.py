"""Quotas in Redis or Valkey, shared by all routers that name the same server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from policies.quota.budget import (
    Descriptor,
    Meter,
    Refused,
    Reservation,
    Standing,
    meters,
    refusal,
    standing_of,
)
from policies.quota.ledger import KEPT_S, milliseconds
from router.shared.redis.faults import faults
from router.shared.redis.line import RedisLine
from router.shared.redis.script import Script
from router.shared.store.base import Fault, StoreFailed
from router.shared.store.debts import Debt
from router.shared.store.scripts import RENEW, RESERVE, SETTLE, STANDING
from tls.certificates import Certificates

CONNECTIONS = 6
"""Most connections of one router; a call that finds none free waits for one."""

ADVANCE_S = 0.1
"""How long requests may be taken from an advance: then the rest is given back."""

_MOST_LEVEL = 2**53
"""Above every level: beyond it the numbers of the scripts would not be exact."""

_PROOF_MS = 60_000

_PROOFS = 64
"""Keys tried for one at each primary of a cluster: of twenty primaries none is likely to be missed."""

LEASE_S = 60.0
"""A reservation that is not renewed for this long lapses: its router is gone."""

ROOM = 16
"""What is taken in advance leaves at least so many times as much of each limit."""


class RedisStore:
    """One script, one round trip for each call, on the server's clock unless a `clock` (Unix seconds) is given.

    `url` is that of one server, of Sentinels or of a cluster (`read_address`). It has no deadlines and no retries;
    GuardedStore has.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pointsman",
        lease_s: float = LEASE_S,
        clock: Callable[[], float] | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self._line = RedisLine(url, certificates, most=CONNECTIONS)
        self._prefix, self._lease_ms, self._clock = prefix, milliseconds(lease_s), clock
        self._reserve, self._settle = Script(RESERVE), Script(SETTLE)
        self._renew, self._standing = Script(RENEW), Script(STANDING)

    def __repr__(self) -> str:
        return f"<RedisStore {self._prefix}>"

    async def reserve(self, asked: Reservation) -> Reservation | Refused:
        fits, now_ms, advanced_ms, levels, reserved = await self._taken(asked, is_granted=False)
        metered = meters(asked.descriptors)
        if fits:
            standing = standing_of(metered, levels, reserved, now_ms=now_ms)
            return replace(asked, standing=standing, levels=tuple(levels), began_ms=now_ms, open=tuple(reserved))
        if asked.advance.requests:
            standing = standing_of(metered, levels, reserved, now_ms=now_ms)
            return Refused(metered[0], asked.charge, None, standing, tuple(levels))
        refused = refusal(metered, levels, asked.charge, reserved, now_ms=now_ms)
        if refused is None:
            raise StoreFailed(Fault.NONSENSE, f"it rejects a reservation that fits: {levels!r}")
        return replace(refused, advanced_ms=advanced_ms)

    async def grant(self, reservation: Reservation) -> None:
        fits, *_ = await self._taken(reservation, is_granted=True)
        if not fits:
            raise StoreFailed(Fault.NONSENSE, "it rejects a reservation that was granted")

    async def _taken(self, asked: Reservation, *, is_granted: bool) -> tuple[int, int, int, list[int], list[int]]:
        """Whether `asked` was taken, the time in milliseconds, how long others hold something in advance if it was not,
        the level of each meter, and what open reservations have of each budget."""
        metered, is_advance = meters(asked.descriptors), bool(asked.advance.requests)
        advance_ms = milliseconds(ADVANCE_S) if is_advance else 0
        arguments: list[str | int] = [self._now(), asked.id, self._lease_ms, advance_ms]
        fresh = asked.advance.amounts(metered)
        for meter, amount, advance in zip(metered, asked.charge.amounts(metered), fresh, strict=True):
            # what has been granted needs no room, and a soft limit is no bound
            if is_granted or meter.is_soft:
                capacity, need = _MOST_LEVEL, 0
            else:
                capacity = meter.capacity
                need = amount + ROOM * advance if is_advance else meter.need(amount)
            arguments += [meter.name, meter.rate, capacity, need, amount]
        with faults():
            reply = await self._reserve.run(self._line.redis, self._keys(asked.descriptors), arguments)
        fits, now_ms, advanced_ms, *found = _integers(reply, 3 + 2 * len(metered))
        return fits, now_ms, advanced_ms, found[: len(metered)], found[len(metered) :]

    async def settle_all(self, debts: Sequence[Debt]) -> None:
        calls = []
        for debt in debts:
            arguments: list[str | int] = [self._now(), debt.id, milliseconds(KEPT_S)]
            arguments += [debt.writer, debt.number, debt.began_ms]
            for amount in debt.amounts:
                arguments += amount
            calls.append((self._keys_of(debt.ledger), arguments))
        with faults():
            replies = await self._settle.run_all(self._line.redis, calls)
        if len(replies) != len(debts) or any(reply not in (0, 1, 2) for reply in replies):
            raise StoreFailed(Fault.NONSENSE, f"settling answers {str(replies)[:80]}")

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        with faults():
            if not reservations:
                await asyncio.gather(*(self._line.redis.set(key, "", px=_PROOF_MS) for key in await self._proofs()))
                return
            arguments: list[str | int] = [
                self._now(),
                self._lease_ms,
                *(reservation.id for reservation in reservations),
            ]
            keys = self._keys([d for reservation in reservations for d in reservation.descriptors])
            await self._renew.run(self._line.redis, keys, arguments)

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        metered = meters(descriptors)
        now_ms, levels, reserved = await self._read(descriptors, metered)
        return standing_of(metered, levels, reserved, now_ms=now_ms)

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        return (await self._read(descriptors, meters(descriptors)))[1]

    async def start(self) -> None:
        """Nothing is done here."""

    async def close(self) -> None:
        await self._line.close()

    async def hang_up(self) -> None:
        await self._line.hang_up()

    async def _proofs(self) -> list[str]:
        """A key at each server that holds ledgers. Writing them proves that all take writes: a replica, and a server
        without free memory or disk, answers a PING like any other."""
        if not self._line.is_cluster:
            return [f"{self._prefix}:proof"]
        cluster = await self._line.redis.initialize()
        keys = [f"{self._prefix}:{{proof {number}}}" for number in range(_PROOFS)]
        return list({cluster.get_node_from_key(key).name: key for key in keys}.values())

    async def _read(
        self, descriptors: Sequence[Descriptor], metered: Sequence[Meter]
    ) -> tuple[int, list[int], list[int]]:
        """The store's time in milliseconds, the level of each of `metered`, the meters of `descriptors`, and what open
        reservations have of each budget."""
        arguments: list[str | int] = [self._now()]
        for meter in metered:
            arguments += [meter.name, meter.rate]
        with faults():
            reply = await self._standing.run(self._line.redis, self._keys(descriptors), arguments)
        now_ms, *found = _integers(reply, 1 + 2 * len(metered))
        return now_ms, found[: len(metered)], found[len(metered) :]

    def _keys(self, descriptors: Sequence[Descriptor]) -> tuple[str, ...]:
        (ledger,) = {descriptor.ledger for descriptor in descriptors}
        return self._keys_of(ledger)

    def _keys_of(self, ledger: str) -> tuple[str, ...]:
        return tuple(f"{self._prefix}:{{{ledger}}}:{what}" for what in ("levels", "held", "due", "writers"))

    def _now(self) -> str | int:
        return "" if self._clock is None else milliseconds(self._clock())


def _integers(reply: Any, count: int) -> list[int]:
    """`reply` if it is a list of `count` integers, none of them negative."""
    if isinstance(reply, list) and len(reply) == count and all(isinstance(n, int) and n >= 0 for n in reply):
        return reply
    raise StoreFailed(Fault.NONSENSE, f"unexpected answer {str(reply)[:80]!r}")

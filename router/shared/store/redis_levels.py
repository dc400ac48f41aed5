"""The levels of all ledgers in a Redis: written once when it is empty, and read to be kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from policies.quota.ledger import MeterLevel, milliseconds
from router.shared.redis.line import RedisLine
from router.shared.store.scripts import OPEN

_Parts = list[tuple[str, int, int, int]]
"""What a reservation took: each meter's name and rate, the amount and the stamp (`router/shared/store/scripts.py`)."""

_PARTS = msgspec.msgpack.Decoder(_Parts)

_AT_ONCE = 500


class RedisLevels:
    """The ledgers below `namespace` in the Redis at `url`. Methods raise StoreFailed. `clock` is Unix time."""

    def __init__(self, url: str, *, namespace: str, clock: Callable[[], float]) -> None:
        self._line, self._namespace, self._clock = RedisLine(url), namespace, clock

    def __repr__(self) -> str:
        return f"<RedisLevels {self._line}>"

    async def resume(self, levels: Sequence[MeterLevel]) -> None:
        """Have `levels` there, without those that are past. A meter that has counted there already goes on as it is."""
        now_ms = milliseconds(self._clock())
        present = [level for level in levels if not level.is_past(now_ms)]
        for at in range(0, len(present), _AT_ONCE):
            async with self._line.pipe() as pipe:
                for level in present[at : at + _AT_ONCE]:
                    pipe.hsetnx(self._key(level.ledger, "levels"), level.name, f"{level.used} {level.at}")
                await pipe.execute()

    async def read(self) -> list[MeterLevel]:
        """What was used of each meter, without open reservations."""
        found: list[MeterLevel] = []
        before, behind = self._key("*", "levels").encode().split(b"*")
        async with self._line.calls() as redis:
            async for key in redis.scan_iter(match=self._key("*", "levels"), count=_AT_ONCE):
                ledger = key[len(before) : -len(behind)].decode()
                # both at one moment: what is settled meanwhile would count twice, or not at all
                async with redis.pipeline(transaction=True) as pipe:
                    pipe.hgetall(key)
                    pipe.hvals(self._key(ledger, "held"))
                    found += _levels(ledger, *await pipe.execute())
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._line.close()

    def _key(self, ledger: str, what: str) -> str:
        return f"{self._namespace}:{{{ledger}}}:{what}"


def _levels(ledger: str, stored: dict[bytes, bytes], held: Sequence[bytes]) -> list[MeterLevel]:
    # what is reserved of a budget belongs to the period with that stamp; a rate has another stamp each time
    reserved: dict[tuple[str, int | None], int] = {}
    for record in held:
        # one that is settled is empty
        for name, rate, amount, at in _PARTS.decode(record) if record else ():
            key = name, None if rate > 0 else at
            reserved[key] = reserved.get(key, 0) + amount
    found = []
    for field, value in stored.items():
        if field.startswith(OPEN):
            continue
        name, (used, at) = field.decode(), map(int, value.split())
        settled = used - reserved.get((name, None), 0) - reserved.get((name, at), 0)
        if settled > 0:
            found.append(MeterLevel(ledger, name, settled, at))
    return found

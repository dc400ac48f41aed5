"""A gateway and its callers in the same process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from policies.explain import Explanation
from policies.nouns import Delta
from policies.quota.budget import Standing
from router.ask import Ask
from router.call.bodies import Held
from router.call.caller import CallerGone, Placement
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.call.tracing import w3c_headers
from tests.router.parts import KEY, a_config, built


class Listener:
    """A caller in the same process: keeps what it gets, and may disconnect after a number of pieces."""

    def __init__(self, ask: Ask, *, hangs_up_after: int | None = None, key: str | None = KEY) -> None:
        self.id, self.key, self._ask, self._left = "r1", key, ask, hangs_up_after
        self.trace: Mapping[str, str] = w3c_headers(ask.headers)
        self.heard: list[Delta] = []
        self.placed: list[str] = []
        self.why: list[Explanation] = []

    async def read(self, held: Held) -> Ask:
        return self._ask

    def limited(self, standing: Standing) -> None:
        self.standing = standing

    def explain(self, index: int, explanation: Explanation) -> None:
        self.why.append(explanation)

    def place(self, index: int, placement: Placement) -> None:
        self.placed.append(placement.backend)

    async def write(self, index: int, delta: Delta) -> None:
        if self._left is not None:
            if not self._left:
                raise CallerGone
            self._left -= 1
        self.heard.append(delta)

    def has_seen(self, index: int) -> bool:
        return any(delta.text for delta in self.heard)


def a_gateway(*backends: Any, **parts: Any) -> Gateway:
    return built(a_config(), backends=lambda _: backends, rng=random.Random(1), **parts).gateway


async def well(gateway: Gateway, *names: str) -> Gateway:
    for name in names:
        assert await gateway.cluster.probe(name)
    return gateway


async def ended(caller: Listener, gateway: Gateway) -> BaseException | None:
    try:
        await serve(caller, gateway)
    except (Exception, asyncio.CancelledError) as error:
        return error
    return None

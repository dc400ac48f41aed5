"""A clock that jumps an hour, back or ahead, closes nothing for longer than it is wrong and a minute."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from policies.keys import hash_of
from policies.sla.parse import parse
from router.start import shared
from router.start.app import Router
from tests.router.identity.local_issuer import a_local_issuer
from tests.router.parts import CHAT, Client, ScriptedBackend, a_chat, a_client

HOUR = 3600.0
LIMITED = "key-of-limited"
FILE = f"""
tenants:
  acme: {{}}
  limited: {{keys: ["sha256:{hash_of(LIMITED)}"], limits: {{requests_per_minute: 3}}}}
pools: {{own: {{kind: fake, model: tiny}}}}
server: {{http: "127.0.0.1:0", grpc: off, keys_file: KEYS}}
"""


class Clock:
    """The machine's clock, this far off."""

    off_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.off_s


async def status(client: Client, key: str) -> int:
    async with client.post(CHAT, a_chat(), key=key) as reply:
        await reply.read()
        return int(reply.status)


async def statuses(client: Client, key: str, count: int = 4) -> list[int]:
    return [await status(client, key) for _ in range(count)]


async def test_limits_tokens_and_issued_keys_follow_a_clock_that_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, backends = Clock(), [ScriptedBackend()]
    monkeypatch.setattr(shared, "time", SimpleNamespace(time=clock))
    async with a_local_issuer("ES256") as issuer:
        text = FILE.replace("KEYS", str(tmp_path / "keys.jsonl")) + issuer.section("{tenant: acme}")
        async with (
            Router(parse(text), backends=lambda _: backends, unix_time=clock) as router,
            a_client(router) as client,
        ):
            assert await router.wait_until_reached(5)
            token = issuer.token()
            key = (await router.gateway.keys.issue("acme", lives_s=HOUR / 2)).text
            full = [200, 200, 200, 429]
            assert await statuses(client, LIMITED) == full
            for off_s, is_known in ((-HOUR, 200), (HOUR, 401), (0.0, 200)):
                # a jump ahead ends tokens and keys that the clock says are over, and a jump back gives them back
                clock.off_s = off_s
                assert (await status(client, token), await status(client, key)) == (is_known, is_known)
                # what was used before a jump back counts for a minute as if it were used now, and no longer
                await statuses(client, LIMITED)
                clock.off_s += 70
                assert await statuses(client, LIMITED) == full
            router.check()

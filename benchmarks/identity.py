"""Cost of a client's identity: with a key, with a token that was seen before, and with a new token of each algorithm.

Identification alone, and whole calls through the pipeline (identify, classify, admit, decide, relay 3 pieces, settle,
count) to a backend that answers from a script, without sockets, in turn with a key and with a known token. Tokens have
ten claims. Times are those of the process; the median of the rounds.

    python benchmarks/identity.py [--calls 200] [--rounds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from joserfc import jwk, jwt

from backends.fake import Answer, FakeBackend
from policies.keys import hash_of
from policies.sla.parse import parse
from router.ask import Ask, Chat
from router.call.bodies import Held
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.start.build import build

KEY = "a-key-of-the-file"
URL = "https://login.example.com"
KINDS: dict[str, tuple[Any, Any]] = {
    "RS256": ("RSA", 2048),
    "PS256": ("RSA", 2048),
    "ES256": ("EC", "P-256"),
    "EdDSA": ("OKP", "Ed25519"),
}
SLA = """
tenants: {{acme: {{keys: ["sha256:{digest}"]}}}}
pools: {{fake: {{kind: fake, at: ["127.0.0.1:1"]}}}}
identity:
  issuers: {{corp: {{issuer: "{url}", audience: pointsman, jwks: "{jwks}"}}}}
  rules: [{{when: {{claims: {{groups: ml}}}}, tenant: acme, user: {{claim: sub}}}}]
"""


class Client:
    """A caller that reads everything."""

    trace: Mapping[str, str] = {}

    def __init__(self, id: str, key: str) -> None:  # noqa: A002
        self.id = id
        self.key: str | None = key

    async def read(self, held: Held) -> Ask:  # noqa: ARG002 - there is no body
        return Ask(
            "fake", (Chat([{"role": "user", "content": "hello"}]),), ({"model": "fake"},), "/v1/chat/completions"
        )

    def limited(self, standing: Any) -> None:
        pass

    def explain(self, index: int, explanation: Any) -> None:
        pass

    def place(self, index: int, placement: Any) -> None:
        pass

    async def write(self, index: int, delta: Any) -> None:
        pass

    def has_seen(self, index: int) -> bool:  # noqa: ARG002
        return False


def a_token(keys: Mapping[str, Any], algorithm: str, number: int) -> str:
    now = int(time.time())
    claims = {"iss": URL, "aud": "pointsman", "sub": "u-17", "iat": now, "exp": now + 3600, "jti": str(number)}
    more = {"groups": ["staff", "ml"], "email": "ann@example.com", "azp": "notebooks", "scope": "openid profile"}
    header = {"alg": algorithm, "kid": algorithm, "typ": "JWT"}
    return jwt.encode(header, {**claims, **more}, keys[algorithm], algorithms=[algorithm])


async def a_gateway(stack: AsyncExitStack, keys: Mapping[str, Any]) -> Gateway:
    place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
    public = [{**key.as_dict(private=False), "kid": name} for name, key in keys.items()]
    place.write_text(json.dumps({"keys": public}))
    config = parse(SLA.format(digest=hash_of(KEY), url=URL, jwks=place))
    gateway = build(config, backends=lambda _: [FakeBackend("b0", script=Answer(texts=("word ",) * 3))]).gateway
    await stack.enter_async_context(gateway.cluster)
    while not gateway.is_ready():
        await gateway.cluster.health_changed()
    assert gateway.identities.tokens is not None
    [issuer] = gateway.identities.tokens.issuers.known()
    assert await issuer.fetch(), issuer.trouble
    return gateway


async def calls_s(gateway: Gateway, key: str, calls: int) -> float:
    """Seconds of the process for one call."""
    began_s = time.process_time()
    for number in range(calls):
        await serve(Client(str(number), key), gateway)
    return (time.process_time() - began_s) / calls


def identified_s(gateway: Gateway, key_of: Callable[[int], str], times: int) -> float:
    """Seconds of the process for one identification."""
    keys = [key_of(number) for number in range(times)]
    began_s = time.process_time()
    for key in keys:
        gateway.identities.of(key, gateway.config)
    return (time.process_time() - began_s) / times


async def compare(calls: int, rounds: int) -> None:
    keys = {name: jwk.generate_key(*kind) for name, kind in KINDS.items()}
    async with AsyncExitStack() as stack:
        gateway = await a_gateway(stack, keys)
        known = a_token(keys, "RS256", -1)
        whole: dict[str, list[float]] = {"a key": [], "a known token": []}
        for _ in range(rounds):
            whole["a key"].append(await calls_s(gateway, KEY, calls))
            whole["a known token"].append(await calls_s(gateway, known, calls))
        alone: dict[str, Callable[[int], str]] = {"a key": lambda _: KEY, "a known token": lambda _: known}
        print(f"{'microseconds':32}{'identified':>12}{'whole call':>12}")
        for name, key_of in alone.items():
            alone_s = statistics.median(identified_s(gateway, key_of, 20 * calls) for _ in range(rounds))
            print(f"{name:32}{1e6 * alone_s:12.2f}{1e6 * statistics.median(whole[name]):12.1f}")
        ratios = [token / key for key, token in zip(*whole.values(), strict=True)]
        print(f"{'a known token against a key':32}{'':12}{statistics.median(ratios):11.3f}x")
        numbers = iter(range(10**9))
        for algorithm in KINDS:
            new = [identified_s(gateway, lambda _, a=algorithm: a_token(keys, a, next(numbers)), 100) for _ in range(5)]
            print(f"{'a new token, ' + algorithm:32}{1e6 * statistics.median(new):12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    asyncio.run(compare(arguments.calls, arguments.rounds))


if __name__ == "__main__":
    main()

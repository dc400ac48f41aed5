"""A whole Pointsman in one process: real shards on the bundled model behind real gRPC, a real router in front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from policies.sla.parse import parse
from router.start.app import Router
from shards.bundled import weights
from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.server import ServerOptions, ShardServer

MODEL = "pointsman-reader"

TWO_TENANTS = """
classes:
  interactive: {ttft_p95: 800ms, tpot_p95: 40ms}
  long-rag: {ttft_p95: 12s}
tenants:
  acme: {keys: ["sha256:dc81b088d47dee432ace4a498915448892259b74b2c58b812bbdd356badfb103"]}
  labs: {keys: ["sha256:0ee448ba51a13b71691ca29004a0ddd26067c8076bb3008f424a9c3442cb9706"]}
pools:
  own: {kind: shard, at: ["127.0.0.1:1"], model: bundled}
rules:
  - {when: {prompt_tokens: ">= 1k"}, class: long-rag, pools: [own]}
  - {class: interactive, pools: [own]}
server: {http: "127.0.0.1:0", grpc: "127.0.0.1:0"}
"""

KEYS = {"acme": "demo-key-of-acme", "labs": "demo-key-of-labs"}


@dataclass
class Whole:
    """The router, its shards and their engines."""

    router: Router
    shards: list[ShardServer]

    async def check_idle(self) -> None:
        """No block, permit, task or stream is left of any request, on either side."""
        self.router.check()
        for shard in self.shards:
            await shard.check()


def bundled_model() -> Model:
    """The bundled model, loaded afresh."""
    return Model.load(weights(), name=MODEL)


@asynccontextmanager
async def a_whole(
    shards: int = 2, *, sla: str = TWO_TENANTS, options: EngineOptions | None = None, model: Model | None = None
) -> AsyncIterator[Whole]:
    """A router in front of `shards` shards, ready to answer. A `model` is for one shard alone."""
    async with AsyncExitStack() as stack:
        servers = []
        for number in range(shards):
            engine = Engine(model or bundled_model(), options or EngineOptions(kv_blocks=512))
            server = ShardServer(engine, "127.0.0.1:0", ServerOptions(shard=f"own-{number}"))
            await server.start()
            stack.push_async_callback(server.close)
            servers.append(server)
        config = parse(sla)
        pool = replace(config.pools["own"], at=tuple(server.address for server in servers))
        config = replace(config, pools={**config.pools, "own": pool})
        router = await stack.enter_async_context(Router(config))
        assert await router.wait_until_reached(timeout_s=20)
        yield Whole(router, servers)

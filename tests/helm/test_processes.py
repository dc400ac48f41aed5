"""The rendered commands, run here: shards, router and Redis as pods would start, probe, change and end them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.helm.chart import Rendered, Values, render
from tests.helm.test_pods import container, pods

ROOT = Path(__file__).parents[2]
SLA = """
classes: {first: {ttft_p95: 800ms}}
tenants: {labs: {keys: "${env:LABS_KEY}"}}
pools: {own: {at: "${env:SHARDS_OWN}"}}
"""
VALUES: Values = {
    "sla": SLA,
    "secrets": {"env": {"LABS_KEY": "demo-key"}},
    "shards": [{"name": "own", "replicas": 2, "options": {"threads": 1, "kv-memory": 0.05}}],
}
ASKED = {"model": "pointsman-reader", "prompt": "The keeper of the Amber mill is", "max_tokens": 2}
WAIT_S = 60
"""A bound for a machine that is busy; what is waited for takes a few seconds."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def on_this_machine(args: Sequence[str], places: Mapping[str, str]) -> list[str]:
    """`args` with each key of `places` replaced: what a pod would have there is elsewhere here."""
    pattern = re.compile("|".join(map(re.escape, places)))
    return [pattern.sub(lambda found: places[found[0]], arg) for arg in args]


@dataclass(frozen=True)
class Started:
    """A process that runs, and the file that it writes to."""

    process: asyncio.subprocess.Process
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    async def until(self, true: Callable[[], Awaitable[bool]], what: str) -> None:
        """Return once `true()` is; fail with the process's output if it ends first, or WAIT_S pass."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not await true():
                    assert self.process.returncode is None, f"ended before {what}:\n{self.output()}"
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"waited in vain: {what}\n{self.output()}")

    async def ends_in_time(self, pod: Mapping[str, Any]) -> bool:
        """Send what kubelet sends; has it gone by itself, well, before kubelet would kill it?"""
        self.process.terminate()
        async with asyncio.timeout(pod["terminationGracePeriodSeconds"]):
            return await self.process.wait() == 0


@asynccontextmanager
async def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> AsyncIterator[Started]:
    """One process that is killed, if it has not ended, when the context is left."""
    inherited = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env={**inherited, **environment}, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield Started(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def grpc_health(port: int) -> bool:
    """The result of kubelet's grpc probe."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def http_health(url: str) -> bool:
    """The result of kubelet's httpGet probe."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(url) as reply:
                return 200 <= reply.status < 400
        except aiohttp.ClientConnectionError:
            return False


def a_shard(rendered: Rendered, port: int) -> tuple[list[str], dict[str, Any]]:
    pod = pods(rendered)["prod-pointsman-shard-own"]
    places = {"0.0.0.0:7001": f"127.0.0.1:{port}", "$(POD_NAME)": "prod-pointsman-shard-own-0"}
    return [sys.executable, "-P", "-m", "router", *on_this_machine(container(pod)["args"], places)], pod


def a_router(rendered: Rendered, configmap: Path, http: int, metrics: int) -> tuple[list[str], dict[str, Any]]:
    pod = pods(rendered)["prod-pointsman-router"]
    places = {
        "0.0.0.0:8080": f"127.0.0.1:{http}",
        "0.0.0.0:8081": f"127.0.0.1:{free_port()}",
        "0.0.0.0:9090": f"127.0.0.1:{metrics}",
        "/etc/pointsman": str(configmap),
    }
    return [sys.executable, "-P", "-m", "router", *on_this_machine(container(pod)["args"], places)], pod


async def test_router_and_shard_start_answer_reload_and_end_as_pods_do(tmp_path: Path) -> None:
    rendered = render(VALUES)
    link, http, metrics = free_port(), free_port(), free_port()
    (tmp_path / "sla.yaml").write_text(rendered.get("ConfigMap", "-sla")["data"]["sla.yaml"])
    # the second shard never comes up: a pool that scales has addresses without a server
    environment = {**rendered.get("Secret", "-router")["stringData"], "SHARDS_OWN": f"127.0.0.1:{link},127.0.0.1:1"}
    shard_command, shard_pod = a_shard(rendered, link)
    router_command, router_pod = a_router(rendered, tmp_path, http, metrics)
    base = f"http://127.0.0.1:{http}"

    async with (
        running(shard_command, {"HOME": str(tmp_path)}, tmp_path / "shard.log") as shard,
        running(router_command, environment, tmp_path / "router.log") as router,
    ):
        probes = container(router_pod)
        alive = base + probes["livenessProbe"]["httpGet"]["path"]
        await router.until(lambda: http_health(alive), "the router lives")
        await shard.until(lambda: grpc_health(link), "the shard is ready")
        started = base + probes["startupProbe"]["httpGet"]["path"]
        await router.until(lambda: http_health(started), "the router has reached its pool")

        async with aiohttp.ClientSession(base, headers={"authorization": "Bearer demo-key"}) as session:
            async with session.post("/v1/completions", json=ASKED) as reply:
                assert reply.status == 200, await reply.text()
                assert (await reply.json())["usage"]["completion_tokens"] == 2

            async def reloaded() -> bool:
                async with session.get(f"http://127.0.0.1:{metrics}/metrics") as reply:
                    return 'pointsman_config_reloads_total{result="accepted"} 1.0' in await reply.text()

            (tmp_path / "new").write_text(SLA.replace("first", "second"))
            (tmp_path / "new").replace(tmp_path / "sla.yaml")
            await router.until(reloaded, "the changed file decides")

        assert await router.ends_in_time(router_pod), router.output()
        assert await shard.ends_in_time(shard_pod), shard.output()


SERVER = shutil.which("redis-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(SERVER is None, reason="no redis-server here")
async def test_redis_starts_with_its_arguments_and_asks_for_its_password(tmp_path: Path) -> None:
    assert SERVER is not None
    rendered, port = render({"redis": {"enabled": True, "password": "a/b:c", "memory": "64Mi"}}), free_port()
    secret = rendered.get("Secret", "-redis")["stringData"]
    args = on_this_machine(
        container(pods(rendered)["prod-pointsman-redis"])["args"], {"$(REDIS_PASSWORD)": secret["password"]}
    )
    command = [SERVER, *args, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    async with running(command, {}, tmp_path / "redis.log") as server:
        async with Redis.from_url(secret["url"].replace("prod-pointsman-redis:6379", f"127.0.0.1:{port}")) as redis:

            async def answers() -> bool:
                try:
                    return bool(await redis.ping())
                except RedisConnectionError:
                    return False

            await server.until(answers, "Redis answers")
            limits = await redis.config_get("maxmemory*")
            assert (limits["maxmemory"], limits["maxmemory-policy"]) == (str(64 * 2**20), "noeviction")
        async with Redis(port=port) as stranger:
            with pytest.raises(AuthenticationError):
                await stranger.ping()
        assert await server.ends_in_time(pods(rendered)["prod-pointsman-redis"]), server.output()

"""Pools that sleep: a request that needs one waits while it starts, and has it started."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import aiohttp
import msgspec

from policies.errors import NoBackend, Overloaded
from policies.nouns import Tenant
from policies.on_miss import Queue, Shed, Spill
from policies.quantities import rounded_seconds
from policies.rules import Facts, classify, pools_within_reach
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from policies.wake import Wake
from router.ask import Ask
from router.fleet.cluster.cluster import Cluster
from router.shared.webhook import webhook_headers

WAITS_S = (1.0, 4.0, 15.0, 30.0)
"""Times between the attempts to start a pool; the last one again and again."""

TIMEOUT_S = 10.0
"""Of one attempt."""

LOOK_EVERY_S = 1.0
"""How often a request looks whether its model is there, if nothing tells it."""

_log = logging.getLogger("pointsman.waking")


class Waking:
    """Starts the pools of the file in force that sleep while requests need them: one hook at a time for each pool.

    `on_waiting(pool, count)` hears how many requests wait for it, `on_event` gets `wake_sent` and `wake_failed`.
    """

    def __init__(
        self,
        config: Callable[[], Config],
        cluster: Cluster,
        unix_time: Callable[[], float],
        *,
        on_waiting: Callable[[str, int], None] = lambda *_: None,
        on_event: Callable[[str], None] = lambda _: None,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        self._config, self._cluster, self._unix_time = config, cluster, unix_time
        self._on_waiting, self._on_event, self._waits_s = on_waiting, on_event, waits_s
        self._hooks: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Waking {dict(self._waiting)}, {len(self._hooks)} hooks>"

    def asleep(self, model: str, pools: Collection[str] | None) -> list[PoolSpec]:
        """Those of `pools` (None: of all) that have `model` or may have it, sleep now, and can be started."""
        found = [
            pool
            for pool in self._config().pools.values()
            if pool.wake is not None and (pools is None or pool.name in pools) and _may_have(pool, model)
        ]
        ready = self._cluster.pools_ready() if found else {}
        return [pool for pool in found if not ready.get(pool.name)]

    def start(self, model: str, pools: Collection[str] | None) -> None:
        """Have those of `pools` started that sleep, though the request goes elsewhere."""
        for pool in self.asleep(model, pools):
            self._start(pool)

    @contextmanager
    def waits(self, model: str, pools: Collection[str] | None) -> Iterator[float]:
        """Count a request as one that waits for those of `pools` that sleep, and have them started; gets the seconds
        for which it may wait, 0 if none sleeps."""
        sleeping = self.asleep(model, pools)
        for pool in sleeping:
            self._count(pool.name, 1)
            self._start(pool)
        try:
            yield max((pool.wake.within_s for pool in sleeping if pool.wake is not None), default=0.0)
        finally:
            for pool in sleeping:
                self._count(pool.name, -1)

    def within_reach(self, tenant: Tenant, model: str) -> frozenset[str] | None:
        """The pools that a request of `tenant` for `model` may start: those of its rules, with their pools for prefill,
        and those that requests spill to; None for all."""
        config = self._config()
        pools = pools_within_reach(tenant, model, config)
        if pools is None:
            return None
        spilled = {step.pool for steps in config.on_miss.values() for step in steps if isinstance(step, Spill)}
        reached = pools | spilled
        return reached | {pool.prefill for name in reached if (pool := config.pools[name]).prefill is not None}

    async def until_served(self, ask: Ask, model: str, facts: Facts, pools: Collection[str] | None) -> None:
        """Return once a backend of `pools` (None: of all) that is well serves `model`; `facts` are those of the call as
        far as they are known without it.

        Raises NoBackend if none does in time, Overloaded if too many requests wait.
        """
        config = self._config()
        with self.waits(model, pools) as within_s:
            if self._waiting.total() > config.server.max_queued:
                raise Overloaded("too many requests wait for models that start", retry_after_s=LOOK_EVERY_S)
            left_s = min(within_s, _patience_s(facts, config))
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    while not any(
                        self._cluster.serves(pool, model)
                        for pool in self._config().pools
                        if pools is None or pool in pools
                    ):
                        with suppress(TimeoutError):
                            async with asyncio.timeout(LOOK_EVERY_S):
                                await self._cluster.health_changed()
                    return
        raise NoBackend(
            f"no backend of model '{ask.model[:80]}' has started within {rounded_seconds(left_s)}",
            hint="it may still start: try again",
            retry_after_s=max(1.0, within_s / 4),
        )

    async def close(self) -> None:
        """End all hooks."""
        hooks = list(self._hooks.values())
        for hook in hooks:
            hook.cancel()
        await asyncio.gather(*hooks, return_exceptions=True)

    def check(self) -> None:
        """Assert that no request of an idle router waits."""
        assert not self._waiting.total(), f"{self!r}: requests wait"

    def _count(self, pool: str, change: int) -> None:
        self._waiting[pool] += change
        self._on_waiting(pool, self._waiting[pool])

    def _start(self, pool: PoolSpec) -> None:
        wake = pool.wake
        if wake is None or (wake.url is None and not wake.command) or pool.name in self._hooks:
            return
        task = asyncio.create_task(self._hook(pool, wake), name=f"start of pool {pool.name}")
        self._hooks[pool.name] = task
        task.add_done_callback(lambda _: self._hooks.pop(pool.name, None))

    async def _hook(self, pool: PoolSpec, wake: Wake) -> None:
        """Have the pool started: again after a failure, as long as requests wait; once done, no more for a while."""
        waits, wait_s, is_first = iter(self._waits_s), self._waits_s[-1], True
        while is_first or self._waiting[pool.name]:
            is_first = False
            problem = await (self._post(pool, wake) if wake.url is not None else _run(wake.command, pool.name))
            if problem is None:
                _log.info("pool %s is being started", pool.name)
                self._on_event("wake_sent")
                # it has this long to start before it is asked again
                await asyncio.sleep(wake.within_s)
                return
            _log.warning("pool %s could not be started: %s", pool.name, problem)
            self._on_event("wake_failed")
            wait_s = next(waits, wait_s)
            await asyncio.sleep(wait_s)

    async def _post(self, pool: PoolSpec, wake: Wake) -> str | None:
        """POST the hook; why that failed, if it did."""
        assert wake.url is not None, "it has a hook"
        content = {"type": "pool.wake", "pool": pool.name, "waiting": self._waiting[pool.name]}
        body, now = msgspec.json.encode(content), int(self._unix_time())
        headers = webhook_headers(uuid.uuid4().hex, body, wake.secret, now)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
                session.post(wake.url, data=body, headers=headers, allow_redirects=False) as reply,
            ):
                return None if reply.status < 300 else f"status {reply.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__


async def _run(command: Sequence[str], pool: str) -> str | None:
    """Run `command` with the pool's name behind it; why that failed, if it did."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, pool, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status = await process.wait()
    except TimeoutError:
        return f"{command[0]} has not ended after {TIMEOUT_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return None if status == 0 else f"{command[0]} ended with {status}"


def _may_have(pool: PoolSpec, model: str) -> bool:
    """Whether `pool` has `model`, as far as the file tells: shards report theirs themselves."""
    named = {*pool.models, *([pool.model] if pool.model is not None and pool.kind != "shard" else [])}
    return model in named if named else pool.kind == "shard"


def _patience_s(facts: Facts, config: Config) -> float:
    """For how long a call may wait before anything is known of its prompt: its class may shed it."""
    service_class = classify(facts, config).service_class
    steps = config.on_miss.get(service_class.name, ())
    if not any(isinstance(step, Shed) for step in steps):
        return float("inf")
    queued = (step.seconds for step in steps if isinstance(step, Queue))
    return max(service_class.ttft_s or 0.0, *queued, 0.0)

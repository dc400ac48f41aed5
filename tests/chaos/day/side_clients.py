"""Clients beside the load: one that submits batches, one that adds documents to a set, and an operator."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.chaos.day.mixed_load import DOCUMENTS, SET
from tests.chaos.load import TENANTS
from tests.chaos.system import System

LINES = 12
BATCH_EVERY_S, DOCUMENT_EVERY_S, OPERATION_EVERY_S = 25.0, 5.0, 3.0
MOST_DOCUMENTS = 60
PATIENCE_S = 20.0
OVER = {"completed", "failed", "expired", "cancelled"}
BATCH_SEEDS = 10_000_000
"""Seeds of the lines of batches begin here."""


class Refused(Exception):
    """An error status, or no answer."""


@dataclass
class Batch:
    """A batch that a router has accepted."""

    tenant: str
    id: str
    lines: list[str]


@dataclass
class SideClients:
    """What they were told: `batches` and documents (`added`) that were accepted, and operations that were done."""

    system: System
    rng: random.Random
    batches: list[Batch] = field(default_factory=list)
    added: dict[str, set[str]] = field(default_factory=lambda: {tenant: set() for tenant in TENANTS})
    operations: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    async def call(self, method: str, url: str, tenant: str | None, **options: Any) -> Any:
        """The answer, JSON if it is. Raises Refused."""
        headers = {"authorization": f"Bearer {self.system.keys[tenant]}"} if tenant else {}
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                aiohttp.ClientSession() as http,
                http.request(method, url, headers=headers, **options) as reply,
            ):
                text = await reply.text()
                if reply.status != 200:
                    raise Refused(f"{reply.status} {text[:200]}")
                return json.loads(text) if "json" in reply.content_type and "content" not in url else text
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Refused(f"{type(error).__name__}") from error

    @property
    def _door(self) -> str:
        return self.rng.choice(self.system.doors).http

    async def put_documents(self) -> None:
        """Each tenant has the set that its requests name."""
        for tenant in TENANTS:
            body = {"documents": DOCUMENTS, "model": self.system.plan.model, "shards": 3}
            await self.call("PUT", f"{self.system.doors[0].http}/v1/document_sets/{SET}", tenant, json=body)

    async def run(self) -> None:
        """Go on until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for act, every_s in (
                (self._submit, BATCH_EVERY_S),
                (self._add, DOCUMENT_EVERY_S),
                (self._operate, OPERATION_EVERY_S),
                (self._list_models, OPERATION_EVERY_S),
            ):
                group.create_task(self._again(act, every_s))

    async def _again(self, act: Callable[[int], Awaitable[None]], every_s: float) -> None:
        for number in range(1_000_000):
            try:
                await act(number)
            except Refused as refused:
                self.refusals[f"{act.__name__.strip('_')}: {str(refused)[:100]}"] += 1
            await asyncio.sleep(every_s)

    async def _submit(self, number: int) -> None:
        tenant = TENANTS[number % 2]
        names = [f"b{number}-{at}" for at in range(LINES)]
        lines = []
        for at, name in enumerate(names):
            body = {
                "model": self.system.plan.model,
                "max_tokens": 8,
                "temperature": 0,
                "seed": BATCH_SEEDS + number * 1000 + at,
                "messages": [{"role": "user", "content": f"Line {at}"}],
            }
            lines.append(json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(lines).encode(), filename="lines.jsonl")
        file = await self.call("POST", f"{self._door}/v1/files", tenant, data=form)
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await self.call("POST", f"{self._door}/v1/batches", tenant, json=asked)
        self.batches.append(Batch(tenant, batch["id"], names))

    async def _add(self, number: int) -> None:
        tenant = TENANTS[number % 2]
        if len(self.added[tenant]) >= MOST_DOCUMENTS:
            return
        names = [f"x{number}-{part}" for part in range(2)]
        adding = [
            self.call(
                "POST",
                f"{self._door}/v1/document_sets/{SET}",
                tenant,
                json={"documents": [{"id": name, "text": f"Note {name}."}]},
            )
            for name in names
        ]
        for name, told in zip(names, await asyncio.gather(*adding, return_exceptions=True), strict=True):
            if isinstance(told, Refused):
                self.refusals[f"add: {str(told)[:100]}"] += 1
            elif isinstance(told, BaseException):
                raise told
            else:
                self.added[tenant].add(name)

    async def _operate(self, number: int) -> None:
        router = self.rng.choice(self.system.routers)
        self.operations["tried"] += 1
        await self.call("PATCH", f"{router.admin}/admin/backends/own-{number % 3}", None, json={"weight": 1.0})
        self.operations["done"] += 1

    async def _list_models(self, _: int) -> None:
        await self.call("GET", f"{self._door}/v1/models", self.rng.choice(TENANTS))

    async def until_batches_end(self, within_s: float) -> list[str]:
        """Wait for the ends of all batches; what does not end."""
        open_batches = list(self.batches)
        said: dict[str, str] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while open_batches:
                    for batch in list(open_batches):
                        with suppress(Refused):
                            found = await self.call("GET", f"{self._door}/v1/batches/{batch.id}", batch.tenant)
                            said[batch.id] = f"{found['status']} {found['request_counts']}"
                            if found["status"] in OVER:
                                open_batches.remove(batch)
                    await asyncio.sleep(0.5)
        return [f"batch {batch.id} of {batch.tenant}: {said.get(batch.id)}" for batch in open_batches]

    async def results(self, batch: Batch) -> list[dict[str, Any]]:
        """The lines of both files of a batch that has ended."""
        found = await self.call("GET", f"{self._door}/v1/batches/{batch.id}", batch.tenant)
        rows = []
        for name in ("output_file_id", "error_file_id"):
            if found.get(name):
                text = await self.call("GET", f"{self._door}/v1/files/{found[name]}/content", batch.tenant)
                rows += [json.loads(line) for line in text.splitlines()]
        return rows

    async def missing_documents(self) -> list[str]:
        """Documents that a router accepted, and another one does not show."""
        missing = []
        for tenant in TENANTS:
            for door in self.system.doors:
                found = await self.call("GET", f"{door.http}/v1/document_sets/{SET}", tenant)
                ids = {each["id"] for each in found["documents"]}
                missing += [f"{name} of {tenant}" for name in self.added[tenant] - ids]
        return sorted(set(missing))

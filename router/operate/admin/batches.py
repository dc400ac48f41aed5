"""The admin port's calls for batches: those of all tenants, and the end of one."""

from __future__ import annotations

from typing import Any

from http1.request import Request, Response
from policies.errors import NoBatches, UnknownBatch
from router.batches.api.openai import shown_batch
from router.batches.batches import Batches
from router.batches.job import Job
from router.operate.dashboard.routes import json_reply
from router.operate.operations import Operations
from router.protocols.http.routes import Routes

_MOST_LISTED = 100
"""Batches of each tenant, the newest."""


def add_batches(routes: Routes, operations: Operations) -> None:
    """Add the calls to `routes`."""

    def batches() -> Batches:
        if operations.batches is None:
            raise NoBatches("this router takes no files and batches", hint=NoBatches.usual_hint)
        return operations.batches

    async def show_all(_: Request) -> Response:
        found = await batches().pace.run(_newest, batches())
        return json_reply({"batches": [_shown(job) for job in found]})

    async def cancel(_: Request, name: str) -> Response:
        open_jobs = await batches().pace.run(lambda: {job: tenant for tenant, job in batches().shelf.open_jobs()})
        tenant = open_jobs.get(name)
        job = None if tenant is None else await batches().pace.run(batches().shelf.job, tenant, name)
        if job is None:
            raise UnknownBatch(f"no batch '{name[:80]}' is open", hint="GET /admin/batches lists them")
        return json_reply(_shown(await batches().cancel(job)))

    routes.add("GET", "/admin/batches", show_all)
    routes.add("POST", "/admin/batches/{name}/cancel", cancel)


def _newest(batches: Batches) -> list[Job]:
    """The newest of all tenants, the newest first. Blocks."""
    shelf = batches.shelf
    found = [
        job
        for tenant in shelf.tenants()
        for name in shelf.jobs(tenant)[-_MOST_LISTED:]
        if (job := shelf.job(tenant, name)) is not None
    ]
    return sorted(found, key=lambda job: -job.created_at)


def _shown(job: Job) -> dict[str, Any]:
    return {"tenant": job.tenant, "api": job.api, **shown_batch(job)}

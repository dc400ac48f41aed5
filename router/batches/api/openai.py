"""`/v1/batches`: create, show, list and cancel batches.

Source: OpenAI API reference, "Batch".
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any, Literal

import msgspec

from http1.request import Request, Response
from policies.errors import InvalidRequest, UnknownBatch
from policies.quantities import read_seconds
from policies.suggest import did_you_mean
from router.batches.api.asker import Desk, json_reply, limit_of, page_after, query_of, read_each
from router.batches.api.files import found_file
from router.batches.batches import Batches
from router.batches.ids import is_id, new_id
from router.batches.job import PREFIXES, Api, Job, Problem
from router.call.identify import Granted
from router.protocols.dialects import DIALECTS, OTHER_PATHS
from router.protocols.http.routes import Routes

BATCHES_PATH = "/v1/batches"

ENDPOINTS = tuple(path for path in DIALECTS if path not in ("/v1/messages", *OTHER_PATHS))

_MOST_LISTED = 100
_MOST_ENTRIES, _MOST_NAME, _MOST_VALUE = 16, 64, 512
_HINTS = {
    "input_file_id": "upload the file first: POST /v1/files with purpose=batch",
    "endpoint": f"one of {', '.join(ENDPOINTS)}",
    "completion_window": "OpenAI's clients send 24h; a shorter time, such as 2h, is accepted too",
    "metadata": "up to 16 texts by name",
}


class OutputExpiry(msgspec.Struct):
    """How long results are kept."""

    seconds: int
    anchor: Literal["created_at"] = "created_at"


class BatchBody(msgspec.Struct):
    """The fields of a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


def add_openai_batches(routes: Routes, desk: Desk) -> None:
    """Add the calls to `routes`."""

    async def create(http: Request) -> Response:
        asker, batches = await desk.asker(http), desk.batches
        body = await desk.body(http, BatchBody, _HINTS)
        _require_endpoint(body.endpoint)
        _require_metadata(body.metadata)
        file = await found_file(asker.tenant, body.input_file_id, batches)
        if file.purpose != "batch":
            hint = "a batch runs on a file of purpose batch"
            raise InvalidRequest(f"the file has the purpose {file.purpose}", hint=hint, param="input_file_id")
        job, shelf = _new_job(body, asker, batches), batches.shelf
        input_bytes = 0 if shelf.store.shares_links else file.size
        try:
            await batches.begin(job, partial(shelf.lend_input, job, file), input_bytes=input_bytes)
        except FileNotFoundError as error:
            raise InvalidRequest("the file was deleted", param="input_file_id") from error
        return json_reply(shown_batch(job))

    async def show_all(http: Request) -> Response:
        tenant, batches, query = (await desk.asker(http)).tenant, desk.batches, query_of(http)
        limit = limit_of(query, usual=20, most=_MOST_LISTED)

        def found() -> Generator[int, None, dict[str, Any]]:
            ids = [each for each in batches.shelf.jobs(tenant) if is_id(each, PREFIXES["openai"])][::-1]
            page = page_after(ids, query.get("after"), limit, param="after")
            jobs = yield from read_each(page.ids, partial(batches.shelf.job, tenant))
            data = [shown_batch(job) for job in jobs]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            return {"object": "list", "data": data, "has_more": page.has_more, **ends}

        return json_reply(await batches.pace.listed(tenant, found()))

    async def show(http: Request, id: str) -> Response:  # noqa: A002 - it is the batch's id
        return json_reply(shown_batch(await found_job((await desk.asker(http)).tenant, id, "openai", desk.batches)))

    async def cancel(http: Request, id: str) -> Response:  # noqa: A002
        job = await found_job((await desk.asker(http)).tenant, id, "openai", desk.batches)
        if job.has_ended:
            raise InvalidRequest(f"the batch has ended: it is {job.status}", hint="only open batches are cancelled")
        return json_reply(shown_batch(await desk.batches.cancel(job)))

    routes.add("POST", BATCHES_PATH, create)
    routes.add("GET", BATCHES_PATH, show_all)
    routes.add("GET", f"{BATCHES_PATH}/{{id}}", show)
    routes.add("POST", f"{BATCHES_PATH}/{{id}}/cancel", cancel)


async def found_job(tenant: str, id: str, api: Api, batches: Batches) -> Job:  # noqa: A002
    """The job of `tenant` with this id. Raises UnknownBatch."""
    job = await batches.pace.run(batches.shelf.job, tenant, id) if is_id(id, PREFIXES[api]) else None
    if job is None:
        raise UnknownBatch(f"there is no batch '{id[:80]}'", param="id")
    return job


def shown_batch(job: Job) -> dict[str, Any]:
    """`job` as OpenAI's clients see it. `estimated_seconds_left` is ours; null while it is unknown."""
    counts, tokens = job.counts, job.tokens
    status: str = "cancelling" if job.is_cancelling else job.status
    ended = None if job.ended_at is None else int(job.ended_at)
    is_known = job.seconds_left is not None and not job.has_ended
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.models[0] if len(job.models) == 1 else None,
        "errors": {"object": "list", "data": [_problem(each) for each in job.problems]} if job.problems else None,
        "input_file_id": job.input_file,
        "completion_window": job.window,
        "status": status,
        "output_file_id": job.output_file if job.has_ended else None,
        "error_file_id": job.error_file if job.has_ended else None,
        "created_at": int(job.created_at),
        "in_progress_at": _whole(job.in_progress_at),
        "expires_at": int(job.expires_at),
        "finalizing_at": _whole(job.finalizing_at),
        "completed_at": ended if job.status == "completed" else None,
        "failed_at": ended if job.status == "failed" else None,
        "expired_at": ended if job.status == "expired" else None,
        "cancelling_at": _whole(job.cancelling_at),
        "cancelled_at": ended if job.status == "cancelled" else None,
        "request_counts": {
            "total": counts.total,
            "completed": counts.succeeded,
            "failed": counts.errored + counts.expired + counts.canceled,
        },
        "usage": {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.prompt + tokens.completion,
        },
        "metadata": job.metadata,
        "estimated_seconds_left": round(job.seconds_left) if is_known and job.seconds_left is not None else None,
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {"code": problem.code, "line": problem.line, "message": problem.message, "param": problem.param}


def _whole(at: float | None) -> int | None:
    return None if at is None else int(at)


def _new_job(body: BatchBody, asker: Granted, batches: Batches) -> Job:
    means, settings = batches.means, batches.settings
    now, results_s = means.unix_time(), None
    if body.output_expires_after is not None:
        results_s = float(body.output_expires_after.seconds)
        if not 3600 <= results_s <= 2_592_000:
            what = "output_expires_after.seconds must be from 3,600 to 2,592,000"
            raise InvalidRequest(what, param="output_expires_after")
    try:
        window_s = read_seconds(body.completion_window)
    except ValueError as error:
        hint = _HINTS["completion_window"]
        raise InvalidRequest(f"completion_window {error}", hint=hint, param="completion_window") from None
    return Job(
        id=new_id(PREFIXES["openai"], now, means.rng),
        tenant=asker.tenant,
        api="openai",
        endpoint=body.endpoint,
        granted=asker,
        input_file=body.input_file_id,
        window=body.completion_window,
        metadata=body.metadata,
        created_at=now,
        expires_at=now + min(window_s, settings.window_s),
        results_s=results_s,
    )


def _require_endpoint(endpoint: str) -> None:
    if endpoint not in ENDPOINTS:
        hint = did_you_mean(endpoint, ENDPOINTS) or _HINTS["endpoint"]
        raise InvalidRequest(f"there are no batches of '{endpoint[:80]}'", hint=hint, param="endpoint")


def _require_metadata(metadata: dict[str, str] | None) -> None:
    for name, value in (metadata or {}).items():
        if len(name) > _MOST_NAME or len(value) > _MOST_VALUE:
            what = f"metadata has names of up to {_MOST_NAME} and values of up to {_MOST_VALUE} characters"
            raise InvalidRequest(what, hint=_HINTS["metadata"], param="metadata")
    if len(metadata or {}) > _MOST_ENTRIES:
        raise InvalidRequest(f"metadata has more than {_MOST_ENTRIES} entries", param="metadata")

"""`/v1/messages/batches`: create, show, list, cancel and delete message batches, and their results.

Source: Anthropic API reference, "Message Batches".
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from backends.messages.answer import MESSAGES_PATH
from backends.nesting import is_deep
from http1.request import Reply, Request, Response
from policies.errors import InvalidRequest, RequestTooLarge, UnknownBatch
from router.batches.api.asker import Desk, json_reply, limit_of, page_after, query_of, read_each, send_file
from router.batches.api.openai import found_job
from router.batches.api.upload import Write, receive
from router.batches.batches import Batches
from router.batches.ids import is_id, new_id
from router.batches.job import PREFIXES, Counts, Job
from router.batches.requests import requests_in
from router.batches.store.base import ContentDraft
from router.call.identify import Granted
from router.protocols.anthropic.request import require_known_version
from router.protocols.http.routes import Routes

MESSAGE_BATCHES_PATH = f"{MESSAGES_PATH}/batches"

_MOST_LISTED = 1000
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_BUFFER_BYTES = 1 << 20
_KEPT_HEADERS = ("anthropic-version", "anthropic-beta")
"""Headers that define how the requests are read."""


def add_anthropic_batches(routes: Routes, desk: Desk) -> None:
    """Add the calls to `routes`."""

    async def create(http: Request) -> Response:
        require_known_version(http.headers.lowered)
        asker, batches = await desk.asker(http), desk.batches
        shelf, most_bytes = batches.shelf, batches.settings.max_file_bytes
        async with AsyncExitStack() as ended:
            upload = ended.enter_context(batches.storage.upload(asker.tenant))
            await batches.pace.run(upload.announce, http.content_length or 0)
            body, lines = [await batches.pace.run(shelf.store.draft, asker.tenant) for _ in range(2)]
            for draft in (body, lines):
                ended.push_async_callback(batches.pace.run, draft.discard)
            await receive(http, partial(upload.write, body), batches.pace, most_bytes=most_bytes)
            count = await batches.pace.run(_lines, body, partial(upload.write, lines), desk)
            await batches.pace.run(body.discard)
            headers = {name: value for name in _KEPT_HEADERS if (value := http.headers.get(name)) is not None}
            job = _new_job(count, asker, batches, headers)
            await batches.begin(job, partial(shelf.give_input, job, lines))
        return json_reply(_shown(job, desk.origin(http)))

    async def show_all(http: Request) -> Response:
        tenant, batches, query = (await desk.asker(http)).tenant, desk.batches, query_of(http)
        limit, before = limit_of(query, usual=20, most=_MOST_LISTED), query.get("before_id")

        def found() -> Generator[int, None, dict[str, Any]]:
            ids = [each for each in batches.shelf.jobs(tenant) if is_id(each, PREFIXES["anthropic"])]
            if before:
                page = page_after(ids, before, limit, param="before_id")
                page = page._replace(ids=page.ids[::-1])
            else:
                page = page_after(ids[::-1], query.get("after_id"), limit, param="after_id")
            jobs = yield from read_each(page.ids, partial(batches.shelf.job, tenant))
            data = [_shown(job, desk.origin(http)) for job in jobs]
            ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
            return {"data": data, "has_more": page.has_more, "first_id": ends[0], "last_id": ends[1]}

        return json_reply(await batches.pace.listed(tenant, found()))

    async def show(http: Request, id: str) -> Response:  # noqa: A002 - it is the batch's id
        job = await found_job((await desk.asker(http)).tenant, id, "anthropic", desk.batches)
        return json_reply(_shown(job, desk.origin(http)))

    async def cancel(http: Request, id: str) -> Response:  # noqa: A002
        job = await found_job((await desk.asker(http)).tenant, id, "anthropic", desk.batches)
        return json_reply(_shown(await desk.batches.cancel(job), desk.origin(http)))

    async def results(http: Request, id: str) -> Reply:  # noqa: A002
        job = await found_job((await desk.asker(http)).tenant, id, "anthropic", desk.batches)
        if not job.has_ended:
            raise InvalidRequest("the batch has not ended", hint="results are there when processing_status is ended")
        try:
            path = await desk.batches.pace.run(desk.batches.shelf.results, job)
            return await send_file(http, path, desk.batches.pace, "application/x-jsonl")
        except FileNotFoundError as error:
            raise UnknownBatch(f"the batch '{id[:80]}' has no results", hint="it was deleted") from error

    async def delete(http: Request, id: str) -> Response:  # noqa: A002
        job = await found_job((await desk.asker(http)).tenant, id, "anthropic", desk.batches)
        if not job.has_ended:
            raise InvalidRequest("the batch has not ended", hint="cancel it first, and delete it when it has ended")
        await desk.batches.pace.run(desk.batches.shelf.drop_job, job)
        return json_reply({"id": id, "type": "message_batch_deleted"})

    routes.add("POST", MESSAGE_BATCHES_PATH, create)
    routes.add("GET", MESSAGE_BATCHES_PATH, show_all)
    routes.add("GET", f"{MESSAGE_BATCHES_PATH}/{{id}}", show)
    routes.add("POST", f"{MESSAGE_BATCHES_PATH}/{{id}}/cancel", cancel)
    routes.add("GET", f"{MESSAGE_BATCHES_PATH}/{{id}}/results", results)
    routes.add("DELETE", f"{MESSAGE_BATCHES_PATH}/{{id}}", delete)


def _lines(body: ContentDraft, write: Write, desk: Desk) -> int:
    """Write each request of `body` as a line; how many there are. Raises InvalidRequest, RequestTooLarge. Blocks."""
    most_bytes = desk.in_force().server.max_body_bytes
    with body.written() as file:
        return _lines_of(desk.batches.pace.through(requests_in(file, most_bytes=most_bytes)), write, desk)


def _lines_of(requests: Iterable[Any], write: Write, desk: Desk) -> int:
    settings, seen, buffer = desk.batches.settings, set[str](), bytearray()
    for request in requests:
        at = f"requests.{len(seen)}"
        if not isinstance(request, dict) or not isinstance(request.get("params"), dict):
            hint = "each request is {'custom_id': ..., 'params': {...}}"
            raise InvalidRequest(f"{at}: `params` is missing", hint=hint, param=at)
        custom_id = request.get("custom_id")
        if not isinstance(custom_id, str) or not _ID.fullmatch(custom_id):
            hint = "use up to 64 letters, digits, _ and -"
            raise InvalidRequest(f"{at}.custom_id is no id", hint=hint, param=f"{at}.custom_id")
        if custom_id in seen:
            hint = "each request needs an id of its own"
            raise InvalidRequest(f"{at}.custom_id is there twice: '{custom_id}'", hint=hint, param=f"{at}.custom_id")
        if len(seen) == settings.max_lines:
            hint = "send several batches, or have the operator raise batches.max_lines"
            raise RequestTooLarge(f"the batch has more than {settings.max_lines:,} requests", hint=hint)
        if is_deep(request):
            raise InvalidRequest(f"{at} is nested too deeply", hint="send a flatter JSON object", param=at)
        seen.add(custom_id)
        line = {"custom_id": custom_id, "method": "POST", "url": MESSAGES_PATH, "body": request["params"]}
        try:
            buffer += msgspec.json.encode(line) + b"\n"
        except UnicodeEncodeError:
            hint = "send text without unpaired surrogates"
            raise InvalidRequest(f"{at}: not valid Unicode", hint=hint, param=at) from None
        if len(buffer) >= _BUFFER_BYTES:
            write(bytes(buffer))
            buffer.clear()
    if not seen:
        raise InvalidRequest("the batch has no requests", hint="send one at least", param="requests")
    write(bytes(buffer))
    return len(seen)


def _new_job(count: int, asker: Granted, batches: Batches, headers: dict[str, str]) -> Job:
    now = batches.means.unix_time()
    return Job(
        id=new_id(PREFIXES["anthropic"], now, batches.means.rng),
        tenant=asker.tenant,
        api="anthropic",
        endpoint=MESSAGES_PATH,
        granted=asker,
        created_at=now,
        in_progress_at=now,
        expires_at=now + batches.settings.window_s,
        status="in_progress",
        headers=headers,
        counts=Counts(count),
    )


def _shown(job: Job, origin: str) -> dict[str, Any]:
    """`job` as Anthropic's clients see it: all requests are processing until all have ended. `progress` is ours."""
    counts, has_ended = job.counts, job.has_ended
    tallied = counts if has_ended else Counts(counts.total)
    status = "ended" if has_ended else "canceling" if job.is_cancelling else "in_progress"
    seconds_left = None if has_ended or job.seconds_left is None else round(job.seconds_left)
    return {
        "id": job.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": tallied.left,
            "succeeded": tallied.succeeded,
            "errored": tallied.errored,
            "canceled": tallied.canceled,
            "expired": tallied.expired,
        },
        "created_at": _at(job.created_at),
        "expires_at": _at(job.expires_at),
        "ended_at": _at(job.ended_at),
        "cancel_initiated_at": _at(job.cancelling_at),
        "archived_at": None,
        "results_url": f"{origin}{MESSAGE_BATCHES_PATH}/{job.id}/results" if has_ended else None,
        "progress": {
            "succeeded": counts.succeeded,
            "errored": counts.errored,
            "total": counts.total,
            "estimated_seconds_left": seconds_left,
        },
    }


def _at(unix_s: float | None) -> str | None:
    """RFC 3339."""
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")

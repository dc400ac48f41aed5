"""`/v1/files`: upload, list, show, read and delete files.

Source: OpenAI API reference, "Files".
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from http1.request import Reply, Request, Response
from policies.errors import InvalidRequest, QuotaExceeded, UnknownFile
from policies.quantities import digits
from policies.suggest import did_you_mean
from router.batches.api.asker import Desk, json_reply, limit_of, page_after, query_of, read_each, send_file
from router.batches.api.upload import UploadForm, receive_form
from router.batches.batches import Batches
from router.batches.ids import is_id, new_id
from router.batches.stored_file import PREFIX, PURPOSES, StoredFile
from router.protocols.http.routes import Routes

FILES_PATH = "/v1/files"

_MOST_LISTED = 10_000

MOST_FILES = 10_000
"""Files of a tenant, besides those that its batches make: each list looks at all their names."""

_LEAST_KEPT_S, _MOST_KEPT_S = 3600, 2_592_000


def add_files(routes: Routes, desk: Desk) -> None:
    """Add the calls to `routes`."""

    async def create(http: Request) -> Response:
        tenant, batches = (await desk.asker(http)).tenant, desk.batches
        settings, shelf = batches.settings, batches.shelf
        await _require_number(tenant, batches)
        async with AsyncExitStack() as ended:
            upload = ended.enter_context(batches.storage.upload(tenant))
            await batches.pace.run(upload.announce, http.content_length or 0)
            draft = await batches.pace.run(shelf.store.draft, tenant)
            ended.push_async_callback(batches.pace.run, draft.discard)
            write = partial(upload.write, draft)
            form = await receive_form(http, write, batches.pace, most_bytes=settings.max_file_bytes)
            # another router may have taken others meanwhile
            await batches.pace.run(upload.announce, 0)
            now = batches.means.unix_time()
            file = StoredFile(
                id=new_id(PREFIX, now, batches.means.rng),
                tenant=tenant,
                purpose=_purpose(form),
                name=form.filename,
                size=draft.size,
                created_at=now,
                expires_at=now + min(settings.keep_s, _kept_s(form) or settings.keep_s),
            )
            await batches.pace.run(shelf.add_file, file, draft)
        return json_reply(shown_file(file))

    async def show_all(http: Request) -> Response:
        tenant, shelf, query = (await desk.asker(http)).tenant, desk.batches.shelf, query_of(http)
        limit, purpose = limit_of(query, usual=_MOST_LISTED, most=_MOST_LISTED), query.get("purpose")
        if (order := query.get("order", "desc")) not in {"asc", "desc"}:
            raise InvalidRequest("order must be asc or desc", param="order")

        def found() -> Generator[int, None, dict[str, Any]]:
            ids = shelf.files(tenant)
            page = page_after(ids if order == "asc" else ids[::-1], query.get("after"), limit, param="after")
            files = yield from read_each(page.ids, partial(shelf.file, tenant))
            data = [shown_file(file) for file in files if purpose in {None, file.purpose}]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            return {"object": "list", "data": data, "has_more": page.has_more, **ends}

        return json_reply(await desk.batches.pace.listed(tenant, found()))

    async def show(http: Request, id: str) -> Response:  # noqa: A002 - it is the file's id
        return json_reply(shown_file(await found_file((await desk.asker(http)).tenant, id, desk.batches)))

    async def content(http: Request, id: str) -> Reply:  # noqa: A002
        shelf = desk.batches.shelf
        file = await found_file((await desk.asker(http)).tenant, id, desk.batches)
        try:
            path = await desk.batches.pace.run(shelf.content, file)
            return await send_file(http, path, desk.batches.pace, "application/octet-stream")
        except FileNotFoundError as error:
            raise _unknown(id) from error

    async def delete(http: Request, id: str) -> Response:  # noqa: A002
        shelf = desk.batches.shelf
        file = await found_file((await desk.asker(http)).tenant, id, desk.batches)
        await desk.batches.pace.run(shelf.drop_file, file)
        return json_reply({"id": id, "object": "file", "deleted": True})

    routes.add("POST", FILES_PATH, create)
    routes.add("GET", FILES_PATH, show_all)
    routes.add("GET", f"{FILES_PATH}/{{id}}", show)
    routes.add("GET", f"{FILES_PATH}/{{id}}/content", content)
    routes.add("DELETE", f"{FILES_PATH}/{{id}}", delete)


async def found_file(tenant: str, id: str, batches: Batches) -> StoredFile:  # noqa: A002
    """The file of `tenant` with this id. Raises UnknownFile."""
    file = await batches.pace.run(batches.shelf.file, tenant, id) if is_id(id, PREFIX) else None
    if file is None:
        raise _unknown(id)
    return file


async def _require_number(tenant: str, batches: Batches) -> None:
    """Raise QuotaExceeded if `tenant` has as many files as it may."""
    if len(await batches.pace.run(batches.shelf.files, tenant)) >= MOST_FILES:
        hint = "delete files that are not needed any more"
        raise QuotaExceeded(f"'{tenant}' has {MOST_FILES:,} files, which is the limit", hint=hint)


def shown_file(file: StoredFile) -> dict[str, Any]:
    """`file` as clients see it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _unknown(id: str) -> UnknownFile:  # noqa: A002
    return UnknownFile(f"there is no file '{id[:80]}'", param="id")


def _purpose(form: UploadForm) -> Any:
    given = form.fields.get("purpose", "")
    if given != PURPOSES[0]:
        hint = did_you_mean(given, PURPOSES[:1]) or "files are for batches here: send purpose=batch"
        raise InvalidRequest(f"the purpose must be batch, not '{given[:80]}'", hint=hint, param="purpose")
    return given


def _kept_s(form: UploadForm) -> float | None:
    """How long the client wants it to be kept."""
    anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at", param="expires_after")
    kept_s = digits(seconds or "", most=_MOST_KEPT_S)
    if kept_s is None or kept_s < _LEAST_KEPT_S:
        what = f"expires_after.seconds must be from {_LEAST_KEPT_S:,} to {_MOST_KEPT_S:,}"
        raise InvalidRequest(what, param="expires_after")
    return float(kept_s)

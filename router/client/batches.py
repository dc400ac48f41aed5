"""`pointsman batch`: submits batches to a router, shows how far they are, and fetches their results."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import msgspec
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from backends.nesting import decode_json
from policies.errors import BackendFailed, InvalidRequest
from router.client.chats import KEY_VARIABLE, refusal_in, root_of, unreached
from router.direct import client_context, with_scheme
from router.inert import inert
from router.private_files import private
from router.terminal import inert_console
from tls.settings import TlsSettings

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
LOOK_S = 1.0
_WIDE = 120
"""Columns of a terminal in which a list has all that is known."""

_MOST_REPLY_BYTES = 16 << 20
_PIECE_BYTES = 256 << 10


class ShownCounts(msgspec.Struct, frozen=True):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""
    line: int | None = None


class _Problems(msgspec.Struct, frozen=True):
    data: list[_Problem] = []


class ShownBatch(msgspec.Struct):
    """A batch as a router shows it. Times are Unix seconds."""

    id: str
    status: str
    endpoint: str = ""
    created_at: int = 0
    expires_at: int | None = None
    request_counts: ShownCounts = ShownCounts()
    output_file_id: str | None = None
    error_file_id: str | None = None
    estimated_seconds_left: int | None = None
    errors: _Problems | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED


class _File(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    data: list[ShownBatch] = []
    has_more: bool = False


class BatchClient:
    """Batches of the router at `url`, as an async context manager. Its methods raise ExpectedError."""

    def __init__(self, url: str, key: str | None = None, tls: TlsSettings | None = None) -> None:
        self._url, self._context = root_of(with_scheme(url, tls)), client_context(tls)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: aiohttp.ClientSession | None = None

    @classmethod
    def from_environment(cls, url: str, tls: TlsSettings | None = None) -> BatchClient:
        """At the router `url`, with the key of KEY_VARIABLE."""
        return cls(url, os.environ.get(KEY_VARIABLE), tls)

    def __repr__(self) -> str:
        return f"<BatchClient of {self._url}>"

    async def __aenter__(self) -> BatchClient:
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(ssl=self._context),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=60.0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def submit(self, file: Path, endpoint: str, window: str) -> ShownBatch:
        """Upload `file` and begin a batch of it."""
        try:
            content = await asyncio.to_thread(file.open, "rb")
        except OSError as error:
            raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
        with content:
            form = aiohttp.FormData()
            form.add_field("purpose", "batch")
            form.add_field("file", content, filename=file.name)
            uploaded = _read(await self._ask("POST", "/v1/files", data=form), _File)
        body = {"input_file_id": uploaded.id, "endpoint": endpoint, "completion_window": window}
        return _batch(await self._ask("POST", "/v1/batches", json=body))

    async def show(self, id: str) -> ShownBatch:  # noqa: A002 - it is the batch's id
        """The batch of this id."""
        return _batch(await self._ask("GET", f"/v1/batches/{id}"))

    async def cancel(self, id: str) -> ShownBatch:  # noqa: A002
        """Cancel the batch of this id."""
        return _batch(await self._ask("POST", f"/v1/batches/{id}/cancel"))

    async def newest(self, most: int) -> list[ShownBatch]:
        """The newest batches, at most so many."""
        found: list[ShownBatch] = []
        while len(found) < most:
            after = f"&after={found[-1].id}" if found else ""
            raw = await self._ask("GET", f"/v1/batches?limit={min(100, most - len(found))}{after}")
            page = _read(raw, _Page)
            found += page.data
            if not page.has_more or not page.data:
                break
        return found

    async def content(self, file: str) -> AsyncIterator[bytes]:
        """The content of a file, piece by piece."""
        async with self._asked("GET", f"/v1/files/{file}/content") as reply:
            async for piece in reply.content.iter_chunked(_PIECE_BYTES):
                yield piece

    async def _ask(self, method: str, path: str, **options: Any) -> bytes:
        async with self._asked(method, path, **options) as reply:
            whole = bytearray()
            async for piece in reply.content.iter_any():
                whole += piece
                if len(whole) > _MOST_REPLY_BYTES:
                    raise BackendFailed(f"the answer of {path} is too long", hint="is it a router?")
            return bytes(whole)

    @asynccontextmanager
    async def _asked(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._http is not None
        try:
            async with self._http.request(method, self._url + path, **options) as reply:
                if reply.status != 200:
                    raise await refusal_in(reply, missing="pointsman batch list shows all of this key")
                yield reply
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreached(self._url, error) from error


def _batch(raw: bytes) -> ShownBatch:
    batch: ShownBatch = _read(raw, ShownBatch)
    return batch


def _read(raw: bytes, kind: type[Any]) -> Any:
    try:
        return decode_json(raw, kind)
    except msgspec.MsgspecError as error:
        raise BackendFailed("the answer is no batch", hint="is it a router?") from error


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file to submit, and what to do then: `wait` for its end, and write results to `out`."""

    file: Path
    endpoint: str
    window: str
    wait: bool
    out: Path | None


def submit(client: BatchClient, wanted: BatchFile) -> bool:
    """Submit a batch; whether it has not failed. Raises ExpectedError."""
    return asyncio.run(_submit(client, wanted))


def wait(client: BatchClient, id: str, out: Path | None) -> bool:  # noqa: A002
    """Wait until a batch has ended; whether it is completed. Raises ExpectedError."""
    return asyncio.run(_wait(client, id, out))


def show(client: BatchClient, id: str) -> None:  # noqa: A002
    """Print one batch. Raises ExpectedError."""
    asyncio.run(_show(client, id))


def show_all(client: BatchClient, most: int) -> None:
    """Print the newest batches. Raises ExpectedError."""
    asyncio.run(_show_all(client, most))


def cancel(client: BatchClient, id: str) -> None:  # noqa: A002
    """Cancel a batch. Raises ExpectedError."""
    asyncio.run(_cancel(client, id))


def results(client: BatchClient, id: str, out: Path | None, *, errors: bool) -> None:  # noqa: A002
    """Write the results of a batch, or its `errors`, to `out`; None: stdout. Raises ExpectedError."""
    asyncio.run(_results(client, id, out, errors=errors))


async def _submit(client: BatchClient, wanted: BatchFile) -> bool:
    async with client:
        batch = await client.submit(wanted.file, wanted.endpoint, wanted.window)
        print(batch.id)  # noqa: T201
        if not wanted.wait and wanted.out is None:
            return True
        return await _until_ended(client, batch, wanted.out)


async def _wait(client: BatchClient, id: str, out: Path | None) -> bool:  # noqa: A002
    async with client:
        return await _until_ended(client, await client.show(id), out)


async def _until_ended(client: BatchClient, batch: ShownBatch, out: Path | None) -> bool:
    """Show the progress of `batch` until it has ended, then write its results; whether it is completed."""
    console = inert_console(stderr=True)
    what, rest = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[left]"))
    columns = (what, BarColumn(), MofNCompleteColumn(), rest)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(batch.status, total=None, left="")
        while True:
            counts, seconds = batch.request_counts, batch.estimated_seconds_left
            left = "" if seconds is None else f"about {timedelta(seconds=seconds)} left"
            done = counts.completed + counts.failed
            bar.update(task, description=batch.status, total=counts.total or None, completed=done, left=left)
            if batch.has_ended:
                break
            await asyncio.sleep(LOOK_S)
            batch = await client.show(batch.id)
    for line in (*_problems(batch), _summary(batch)):
        print(line, file=sys.stderr)  # noqa: T201
    if out is not None and batch.output_file_id is not None:
        await _write(client, batch.output_file_id, out)
    elif out is not None:
        print(f"{out} is not written: no request succeeded", file=sys.stderr)  # noqa: T201
    return batch.status == "completed" and (out is None or batch.output_file_id is not None)


def _problems(batch: ShownBatch) -> list[str]:
    """Why it failed, a mistake of its file in each line."""
    found = batch.errors.data if batch.errors else []
    return [("" if each.line is None else f"line {each.line}: ") + each.message for each in found]


def _summary(batch: ShownBatch) -> str:
    counts = batch.request_counts
    if batch.status == "failed":
        return "failed: the file has mistakes, and none of its requests was sent"
    hint = f" (which and why: pointsman batch results {batch.id} --errors)" if batch.error_file_id else ""
    return (
        f"{batch.status}: {counts.completed:,} of {counts.total:,} requests succeeded, {counts.failed:,} failed{hint}"
    )


async def _show(client: BatchClient, id: str) -> None:  # noqa: A002
    async with client:
        for line in _details(await client.show(id)):
            print(line)  # noqa: T201


async def _show_all(client: BatchClient, most: int) -> None:
    async with client:
        found = await client.newest(most)
    console = inert_console(width=None if sys.stdout.isatty() else _WIDE)
    console.print(_table(found, is_wide=console.width >= _WIDE) if found else "No batches.")


async def _cancel(client: BatchClient, id: str) -> None:  # noqa: A002
    async with client:
        print((await client.cancel(id)).status)  # noqa: T201


async def _results(client: BatchClient, id: str, out: Path | None, *, errors: bool) -> None:  # noqa: A002
    async with client:
        batch = await client.show(id)
        file = batch.error_file_id if errors else batch.output_file_id
        if not batch.has_ended:
            raise InvalidRequest(f"the batch is {batch.status}", hint=f"wait for it: pointsman batch wait {id}")
        if file is None:
            hint = "" if errors or not batch.error_file_id else f"see its errors: pointsman batch results {id} --errors"
            raise InvalidRequest(f"the batch has no {'errors' if errors else 'results'}", hint=hint)
        await _write(client, file, out)


async def _write(client: BatchClient, file: str, out: Path | None) -> None:
    if out is None:
        # as it is for a program, and inert for a terminal
        shown = codecs.getincrementaldecoder("utf-8")("replace").decode if sys.stdout.isatty() else None
        async for piece in client.content(file):
            sys.stdout.buffer.write(piece if shown is None else inert(shown(piece)).encode())
        sys.stdout.buffer.flush()
        return
    try:
        with await asyncio.to_thread(lambda: open(out, "wb", opener=private)) as to:
            async for piece in client.content(file):
                await asyncio.to_thread(to.write, piece)
    except OSError as error:
        raise InvalidRequest(f"{out} cannot be written: {error.strerror}") from error


def _details(batch: ShownBatch) -> list[str]:
    """One batch, a name and a value in each line, and the mistakes of its file."""
    counts = batch.request_counts
    values = {
        "batch": batch.id,
        "status": batch.status,
        "endpoint": batch.endpoint,
        "created": _time(batch.created_at),
        "expires": "" if batch.expires_at is None or batch.has_ended else _time(batch.expires_at),
        "requests": f"{counts.total:,}",
        "succeeded": f"{counts.completed:,}",
        "failed": f"{counts.failed:,}",
        "left": _left(batch),
    }
    return [*(f"{name:10} {value}" for name, value in values.items() if value), *_problems(batch)]


def _table(batches: list[ShownBatch], *, is_wide: bool) -> Table:
    """A row for each; without the endpoint and the time where these would cut the ids."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("batch", "status", *(("endpoint", "created") if is_wide else ())):
        table.add_column(name, no_wrap=True)
    for name in ("done", "failed", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in batches:
        counts = batch.request_counts
        table.add_row(
            *(batch.id, batch.status, *((batch.endpoint, _time(batch.created_at)) if is_wide else ())),
            *(f"{counts.completed + counts.failed:,}/{counts.total:,}", f"{counts.failed:,}", _left(batch)),
        )
    return table


def _time(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def _left(batch: ShownBatch) -> str:
    seconds = batch.estimated_seconds_left
    return "" if seconds is None or batch.has_ended else str(timedelta(seconds=seconds))

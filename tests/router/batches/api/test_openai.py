"""Files and batches with OpenAI's official client."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from policies.errors import BackendFailed, Overloaded
from policies.nouns import Delta, Limits, Usage
from router.batches import running
from router.batches.job import Job
from router.batches.shelf import BatchShelf
from router.batches.store.base import BatchStoreFailed
from router.batches.store.directory import DirectoryClaim, DirectoryStore
from router.batches.stored_file import StoredFile
from tests.router.batches.parts import (
    OTHER_KEY,
    a_batch_config,
    a_batch_router,
    a_line,
    begun,
    ended,
    files_in,
    lines_in,
    openai_client,
    until,
    uploaded,
)
from tests.router.parts import CHAT, KEY, MODEL, ScriptedBackend, a_client, a_router, an_answer, series


async def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        lines = [*(a_line(number) for number in range(5)), a_line(5, temperature="hot"), a_line(6, model="none")]
        batch = await begun(client, lines, metadata={"team": "search"})
        assert (batch.status, batch.metadata) == ("validating", {"team": "search"})
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 7, "completed": 5, "failed": 2}
        assert (
            batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
        )
        assert batch.expires_at == batch.created_at + 86_400
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (35, 10, 45)
        assert batch.usage.input_tokens_details.cached_tokens == 15
        answers, errors = await lines_in(client, batch.output_file_id), await lines_in(client, batch.error_file_id)
        assert answers.keys() == {f"r{number}" for number in range(5)}
        for line in answers.values():
            assert line["error"] is None
            assert line["response"]["status_code"] == 200
            assert line["response"]["body"]["choices"][0]["message"]["content"] == "ok"
        assert errors["r5"]["response"]["status_code"] == 400
        assert errors["r5"]["response"]["body"]["error"]["param"] == "temperature"
        assert errors["r6"]["response"]["status_code"] == 404
        file = await client.files.retrieve(batch.output_file_id or "")
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert series(router.telemetry.registry, "batch_lines_total") == {
            ("acme", "succeeded"): 5.0,
            ("acme", "errored"): 2.0,
        }
        assert series(router.telemetry.registry, "requests_total")["acme", "batch", "finished"] == 5.0


@pytest.mark.parametrize("unsaid", [{}, {"model": None}, {"model": ""}])
async def test_lines_without_a_model_mean_the_only_one(tmp_path: Path, unsaid: dict[str, Any]) -> None:
    one, other = ScriptedBackend(), ScriptedBackend("b1", model="other")
    body = {"messages": [{"role": "user", "content": "hi"}], **unsaid}
    lines = [{"custom_id": "r0", "method": "POST", "url": CHAT, "body": body}]
    async with a_batch_router(tmp_path / "one", one) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, lines))
        assert (batch.status, batch.model, batch.request_counts.completed) == ("completed", MODEL, 1)  # type: ignore[union-attr]
    async with a_batch_router(tmp_path / "two", one, other) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, lines))
        errors = await lines_in(client, batch.error_file_id)
        assert errors["r0"]["response"]["status_code"] == 400
        assert errors["r0"]["response"]["body"]["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "say"}),
        ("/v1/responses", {"input": "say"}),
    ],
)
async def test_other_endpoints_have_batches_too(tmp_path: Path, endpoint: str, body: dict[str, Any]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, [line], endpoint=endpoint))
        assert batch.status == "completed"
        assert (await lines_in(client, batch.output_file_id))["a"]["response"]["status_code"] == 200


async def test_lines_yield_and_are_not_streamed(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    async with a_batch_router(tmp_path, backend) as router, openai_client(router) as client:
        await ended(client, await begun(client, [a_line(0, stream=True, stream_options={"include_usage": True})]))
    [request] = backend.requests
    assert (request.rank, request.preemptible, request.stream) == (65536, True, False)


async def test_a_file_with_mistakes_fails_as_a_whole(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, [a_line(0), {"custom_id": "x"}, a_line(0)]))
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors is not None
        found = [(error.line, error.code) for error in batch.errors.data or ()]
        assert found == [(2, "missing_required_parameter"), (3, "duplicate_custom_id")]
        assert router.operations.batches is not None
        async with asyncio.timeout(30):
            # its last state is shown before its input is dropped
            while router.operations.batches.shelf.store.names("inputs"):  # noqa: ASYNC110 - it is a folder
                await asyncio.sleep(0.02)


async def test_a_batch_that_is_cancelled_keeps_what_was_answered_and_ends_lines_in_flight(tmp_path: Path) -> None:
    held = asyncio.Event()
    backend = ScriptedBackend(scripts=[an_answer("first"), [held], [held]])
    async with a_batch_router(tmp_path, backend) as router, openai_client(router) as client:
        batch = await begun(client, [a_line(number) for number in range(3)])
        batch = await until(client, batch, lambda now: (now.request_counts and now.request_counts.completed) == 1)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert (batch.status, backend.open) == ("cancelled", 0)
        assert batch.cancelling_at is not None
        assert batch.cancelled_at is not None
        assert len(await lines_in(client, batch.output_file_id)) == 1
        errors = await lines_in(client, batch.error_file_id)
        assert [line["error"]["code"] for line in errors.values()] == ["batch_cancelled"] * 2
        with pytest.raises(openai.BadRequestError, match="the batch has ended: it is cancelled"):
            await client.batches.cancel(batch.id)


async def test_what_is_not_answered_in_time_is_expired(tmp_path: Path) -> None:
    backend = ScriptedBackend(scripts=[an_answer("first"), [asyncio.Event()]])
    async with a_batch_router(tmp_path, backend) as router, openai_client(router) as client:
        batch = await begun(client, [a_line(0), a_line(1)], completion_window="2s")
        batch = await ended(client, batch)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        assert batch.expired_at >= (batch.expires_at or 0)
        assert len(await lines_in(client, batch.output_file_id)) == 1
        errors = await lines_in(client, batch.error_file_id)
        assert [line["error"]["code"] for line in errors.values()] == ["batch_expired"]


async def test_a_line_is_tried_again_where_its_failure_may_pass(tmp_path: Path) -> None:
    scripts = [[Overloaded("busy", retry_after_s=0.01)], [BackendFailed("gone")], an_answer("at last")]
    async with (
        a_batch_router(tmp_path, ScriptedBackend(scripts=scripts)) as router,  # type: ignore[arg-type]
        openai_client(router) as client,
    ):
        batch = await ended(client, await begun(client, [a_line(0)]))
        assert batch.status == "completed"
        answer = (await lines_in(client, batch.output_file_id))["r0"]["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == "at last"


async def test_lines_wait_for_the_quota_of_their_tenant(tmp_path: Path) -> None:
    config = a_batch_config(tmp_path)
    tenant = replace(config.tenants["acme"], limits=Limits(requests_per_minute=2))
    hashes = dict.fromkeys(tenant.key_hashes, tenant)
    config = replace(
        config, tenants={**config.tenants, "acme": tenant}, tenant_by_key_hash={**config.tenant_by_key_hash, **hashes}
    )
    async with a_router(config=config) as router, openai_client(router) as client:
        batch = await begun(client, [a_line(number) for number in range(250)])
        await until(client, batch, lambda now: (now.request_counts and now.request_counts.completed) == 2)
        batches, retries = router.operations.batches, dict[tuple[str, ...], float]()
        assert batches is not None
        async with asyncio.timeout(10):
            while not retries or batches.room.waiting or batches.room.inside:
                await asyncio.sleep(0.02)
                retries = series(router.telemetry.registry, "batch_retries_total")
        # those that were sent together; the others were not sent
        assert retries["rate_limit_exceeded",] < 100
        batch = await client.batches.retrieve(batch.id)
        assert batch.status == "in_progress"
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 2
        await client.batches.cancel(batch.id)
        await ended(client, batch)


async def test_a_tenant_sees_its_own_alone(tmp_path: Path) -> None:
    async with (
        a_batch_router(tmp_path) as router,
        openai_client(router) as client,
        openai_client(router, OTHER_KEY) as other,
    ):
        batch = await ended(client, await begun(client, [a_line(0)]))
        for call in (
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id or ""),
            other.files.delete(batch.input_file_id),
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no"):
                await call
        assert (await other.batches.list()).data == []
        assert (await other.files.list()).data == []


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        files = [await uploaded(client, [a_line(number)]) for number in range(3)]
        made = [
            await client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h") for file in files
        ]
        for batch in made:
            await ended(client, batch)
        assert [each.id async for each in client.batches.list(limit=2)] == [batch.id for batch in reversed(made)]
        page = await client.batches.list(limit=2)
        assert page.has_more
        inputs = [each.id async for each in client.files.list(limit=2, order="asc") if each.purpose == "batch"]
        assert inputs == files
        assert len([each async for each in client.files.list(purpose="batch_output")]) == 3


async def test_a_file_is_read_back_and_deleted_while_its_batch_goes_on(tmp_path: Path) -> None:
    held = asyncio.Event()
    async with (
        a_batch_router(tmp_path, ScriptedBackend(scripts=[[held, *an_answer("ok")]])) as router,
        openai_client(router) as client,
    ):
        batch = await begun(client, [a_line(0), a_line(1)])
        content = await client.files.content(batch.input_file_id)
        assert [json.loads(line) for line in content.text.splitlines()] == [a_line(0), a_line(1)]
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await client.files.retrieve(batch.input_file_id)
        held.set()
        assert (await ended(client, batch)).status == "completed"


async def test_a_file_may_be_kept_for_a_shorter_time(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        kept = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(file=("a", b"x"), purpose="batch", expires_after=kept)  # type: ignore[arg-type]
        assert file.expires_at == file.created_at + 3600
        batch = await ended(client, await begun(client, [a_line(0)], output_expires_after=kept))
        output = await client.files.retrieve(batch.output_file_id or "")
        assert output.expires_at == output.created_at + 3600


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v1/chat/completion"}, "did you mean '/v1/chat/completions'"),
        ({"endpoint": "/v1/messages"}, "there are no batches of '/v1/messages'"),
        ({"completion_window": "soon"}, "completion_window must be a duration"),
        ({"metadata": {"x" * 65: ""}}, "names of up to 64"),
        ({"metadata": {str(number): "" for number in range(17)}}, "more than 16 entries"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "must be from 3,600"),
    ],
)
async def test_a_wrong_field_of_a_batch_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        with pytest.raises(openai.BadRequestError, match=message):
            await begun(client, [a_line(0)], **fields)


async def test_results_are_no_input(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, [a_line(0)]))
        with pytest.raises(openai.BadRequestError, match="the file has the purpose batch_output"):
            await client.batches.create(
                input_file_id=batch.output_file_id or "", endpoint=CHAT, completion_window="24h"
            )


BOUNDARY = {"content-type": "multipart/form-data; boundary=xyz"}
PURPOSE = b'--xyz\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"{}", {"content-type": "application/json"}, 400, "the body is no form"),
        (PURPOSE + FILE, BOUNDARY, 400, "the form broke off"),
        (PURPOSE + b"--xyz--\r\n", BOUNDARY, 400, "the form has no file"),
        (FILE + FILE + PURPOSE + b"--xyz--\r\n", BOUNDARY, 400, "the form has two files"),
        (34 * PURPOSE + b"--xyz--\r\n", BOUNDARY, 400, "the form has more than 32 fields"),
        (FILE + b"--xyz--\r\n", BOUNDARY, 400, "the purpose must be batch, not ''"),
        (FILE + PURPOSE.replace(b"batch", b"fine-tune") + b"--xyz--\r\n", BOUNDARY, 400, "not 'fine-tune'"),
        (b"nothing", BOUNDARY, 400, "the form is malformed"),
        (PURPOSE.replace(b"batch", b"x" * 70_000) + FILE + b"--xyz--\r\n", BOUNDARY, 400, "`purpose` is too long"),
        (PURPOSE * 32 + FILE + b"--xyz--\r\n", BOUNDARY, 200, ""),
        (PURPOSE + FILE + b"--xyz--\r\n", {**BOUNDARY, "content-encoding": "gzip"}, 400, "not read compressed"),
        (PURPOSE + FILE.replace(b"{}", b"x" * 3000) + b"--xyz--\r\n", BOUNDARY, 413, "larger than 2,000 bytes"),
        (PURPOSE + FILE.replace(b"{}", b"x" * 900_000), BOUNDARY, 413, "larger than 2,000 bytes"),
    ],
)
async def test_a_wrong_upload_is_refused_and_leaves_nothing(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    async with a_batch_router(tmp_path, max_file_bytes=2000) as router, a_client(router) as client:
        async with client.post("/v1/files", data=body, headers=headers) as reply:
            assert (reply.status, message in await reply.text()) == (status, True)
        assert router.operations.batches is not None
        assert not files_in(router.operations.batches.shelf.store.scratch())


async def test_a_tenant_has_so_many_batches_and_bytes(tmp_path: Path) -> None:
    held = asyncio.Event()
    backend = ScriptedBackend(scripts=[[held, *an_answer("ok")]])
    async with (
        a_batch_router(tmp_path, backend, max_jobs=1, max_storage_bytes=2000) as router,
        openai_client(router) as client,
        openai_client(router, OTHER_KEY) as other,
    ):
        batch = await begun(client, [a_line(0)])
        with pytest.raises(openai.RateLimitError, match="has 1 batches that have not ended, which is its limit"):
            await begun(client, [a_line(0)])
        await begun(other, [a_line(0)])
        with pytest.raises(openai.RateLimitError, match="2,000 are its limit"):
            await uploaded(client, [a_line(0, "x" * 2000)])
        held.set()
        await ended(client, batch)


async def test_a_router_without_the_section_says_so() -> None:
    async with a_router() as router, openai_client(router) as client, a_client(router) as plain:
        with pytest.raises(openai.NotFoundError, match="the operator turns them on with `batches:"):
            await client.batches.list()
        async with plain.get("/v1/messages/batches") as reply:
            assert (reply.status, (await reply.json())["error"]["type"]) == (404, "not_found_error")


async def test_keys_are_asked_for(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, a_client(router) as client:
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x", "/v1/messages/batches"):
            async with client.get(path, "wrong") as reply:
                assert reply.status == 401, path
        async with client.get("/v1/files/..%2f..%2fsecret", KEY) as reply:
            assert reply.status == 404
        async with client.get("/v1/files?limit=0") as reply:
            assert "limit must be from 1 to 10,000" in await reply.text()
        async with client.get("/v1/files?order=up") as reply:
            assert "order must be asc or desc" in await reply.text()
        async with client.get("/v1/batches?after=batch_x") as reply:
            assert "there is no 'batch_x' in this list" in await reply.text()


async def test_a_batch_goes_on_once_the_folder_for_temporary_files_can_be_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        assert router.operations.batches is not None
        scratch = tmp_path / "later"
        monkeypatch.setattr(router.operations.batches.shelf.store, "scratch", lambda: scratch)
        batch = await begun(client, [a_line(0)])
        async with asyncio.timeout(30):
            while "goes on later" not in caplog.text:  # noqa: ASYNC110 - it is a log
                await asyncio.sleep(0.02)
        scratch.mkdir()
        assert (await ended(client, batch)).status == "completed"
        assert "Traceback" not in caplog.text


ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(ANSWER, indent=2).encode(),
        json.dumps(ANSWER).encode() + b"\n",
        json.dumps(ANSWER, indent="\t").replace("\n", "\r\n").encode(),
        json.dumps(ANSWER | {"logprob": float("-inf")}).encode(),
        json.dumps(ANSWER).replace('"ok"', '"\\ud83d"').encode(),
        json.dumps(ANSWER).replace('"ok"', '"a\u2028b"').encode(),
    ],
    ids=["indented", "line break", "CRLF", "-Infinity", "half a pair", "U+2028"],
)
async def test_an_answer_is_one_line_of_the_results_however_the_backend_wrote_it(tmp_path: Path, body: bytes) -> None:
    whole = Delta(body=body, text="ok", is_whole=True, finish_reason="stop", usage=Usage(7, 2, 3))
    backend = ScriptedBackend(scripts=[[whole] for _ in range(3)])
    async with a_batch_router(tmp_path, backend) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, [a_line(number) for number in range(3)]))
        assert batch.status == "completed"
        assert (await lines_in(client, batch.output_file_id)).keys() == {"r0", "r1", "r2"}
        assert len(backend.requests) == 3


async def test_an_answer_that_is_no_json_is_a_failure_of_its_line_alone(tmp_path: Path) -> None:
    broken = Delta(body=b"<html>", text="", is_whole=True, finish_reason="stop", usage=Usage(7, 2, 3))
    good = an_answer("ok")
    backend = ScriptedBackend(scripts=[[broken], good])
    async with a_batch_router(tmp_path, backend) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, [a_line(0)]))
        assert batch.status == "completed"
        assert len(backend.requests) == 2


async def test_a_write_of_progress_that_is_slow_is_not_behind_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, answered, held = threading.Event(), asyncio.Event(), [0]
    save = BatchShelf.save_job
    loop = asyncio.get_running_loop()

    def save_slowly(self: BatchShelf, job: Job) -> Job:
        if job.status == "in_progress" and job.counts.succeeded == 1:
            held[0] += 1
            loop.call_soon_threadsafe(answered.set)
            slow.wait(10)
        return save(self, job)

    monkeypatch.setattr(BatchShelf, "save_job", save_slowly)
    backend = ScriptedBackend(scripts=[an_answer("ok"), [answered, *an_answer("ok")]])
    async with a_batch_router(tmp_path, backend) as router, openai_client(router) as client:
        batch = await begun(client, [a_line(0), a_line(1)])
        await answered.wait()
        while backend.open:  # noqa: ASYNC110 - it is a counter
            await asyncio.sleep(0.01)
        # its last line is answered, and an earlier state is still being written
        await asyncio.sleep(0.2)
        slow.set()
        batch = await ended(client, batch)
        assert (held[0], batch.status) == (1, "completed")
        assert router.operations.batches is not None
        async with asyncio.timeout(10):
            while [*router.operations.batches.shelf.open_jobs()]:  # noqa: ASYNC110 - it is a folder
                await asyncio.sleep(0.01)
        assert (await client.batches.retrieve(batch.id)).status == "completed"


async def test_files_that_were_deleted_count_while_batches_run_on_them(tmp_path: Path) -> None:
    held = asyncio.Event()
    backend = ScriptedBackend(scripts=[[held, *an_answer("ok")]])
    async with (
        a_batch_router(tmp_path, backend, max_storage_bytes=100_000, max_file_bytes=50_000) as router,
        openai_client(router) as client,
    ):
        line = json.dumps(a_line(0)).encode() + b" " * 30_000
        for _ in range(3):
            file = await client.files.create(file=("lines.jsonl", line), purpose="batch")
            await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            await client.files.delete(file.id)
        with pytest.raises(openai.RateLimitError, match="100,000 are its limit"):
            await client.files.create(file=("lines.jsonl", line), purpose="batch")
        assert sum(path.stat().st_size for path in files_in(tmp_path)) < 100_000
        held.set()


async def test_bodies_of_batches_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    held = asyncio.Event()
    async with (
        a_batch_router(tmp_path, ScriptedBackend(scripts=[[held, *an_answer("ok")]]), max_jobs=1) as router,
        a_client(router) as client,
    ):
        body = {"requests": [{"custom_id": "a", "params": {"model": MODEL, "max_tokens": 1, "messages": []}}]}
        found = []
        for _ in range(4):
            async with client.post("/v1/messages/batches", data=json.dumps(body)) as reply:
                found.append(reply.status)
        assert router.operations.batches is not None
        assert len(router.operations.batches.shelf.store.names("inputs")) <= found.count(200)
        assert 429 in found
        held.set()


async def test_no_more_than_so_many_batches_begin_at_once(tmp_path: Path) -> None:
    held = asyncio.Event()
    async with (
        a_batch_router(tmp_path, ScriptedBackend(scripts=[[held, *an_answer("ok")]] * 8), max_jobs=3) as router,
        openai_client(router) as client,
    ):
        file = await uploaded(client, [a_line(0)])
        begin = [client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h") for _ in range(8)]
        made = [each for each in await asyncio.gather(*begin, return_exceptions=True) if isinstance(each, Batch)]
        assert 1 <= len(made) <= 3
        assert router.operations.batches is not None
        assert len([*router.operations.batches.shelf.open_jobs()]) == len(made)
        held.set()


async def test_a_batch_waits_while_its_tenant_stores_all_that_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.running._STORAGE_LOOKS", 1)
    backend = ScriptedBackend(scripts=[[Overloaded("busy", retry_after_s=0.01)]])
    async with a_batch_router(tmp_path, backend, max_storage_bytes=10_000) as router, openai_client(router) as client:
        batches = router.operations.batches
        assert batches is not None
        file, full = await uploaded(client, [a_line(0)]), threading.Event()
        is_full, looks = batches.storage.is_full, [0]

        def looked_at(tenant: str) -> bool:
            looks[0] += 1
            return not full.is_set() or is_full(tenant)

        monkeypatch.setattr(batches.storage, "is_full", looked_at)
        batch = await client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        async with asyncio.timeout(20):
            while looks[0] < 2:  # noqa: ASYNC110 - a thread counts
                await asyncio.sleep(0.02)
        full.set()
        assert (await ended(client, batch)).status == "completed"


async def test_uploads_of_others_do_not_wait_while_a_tenant_lists_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        assert router.operations.batches is not None
        shelf = router.operations.batches.shelf
        own = await uploaded(client, [a_line(0)])
        read = shelf.file

        def slow(tenant: str, id: str) -> StoredFile | None:  # noqa: A002
            goes_on.wait()
            return read(tenant, id)

        monkeypatch.setattr(shelf, "file", slow)
        lists = [asyncio.ensure_future(client.files.list()) for _ in range(32)]
        try:
            async with openai_client(router, OTHER_KEY) as other:
                assert await uploaded(other, [a_line(0)])
        finally:
            goes_on.set()
        for page in await asyncio.gather(*lists):
            assert [file.id for file in page.data] == [own]


async def test_a_tenant_has_a_bounded_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.api.files.MOST_FILES", 2)
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        first, _ = [await uploaded(client, []) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="has 2 files, which is the limit"):
            await uploaded(client, [])
        async with openai_client(router, OTHER_KEY) as other:
            await uploaded(other, [])
        await client.files.delete(first)
        await uploaded(client, [])


async def test_a_batch_goes_on_once_its_answers_can_be_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        assert router.operations.batches is not None
        store = router.operations.batches.shelf.store
        open_log = store.log

        def log(key: str) -> Any:
            opened = open_log(key)
            append = opened.append

            def append_or_fail(data: bytes) -> Any:
                if is_full:
                    raise BatchStoreFailed("the store of batches failed: no space left")
                return append(data)

            monkeypatch.setattr(opened, "append", append_or_fail)
            return opened

        monkeypatch.setattr(store, "log", log)
        batch = await begun(client, [a_line(0)])
        async with asyncio.timeout(30):
            while "goes on later" not in caplog.text:  # noqa: ASYNC110 - it is a log
                await asyncio.sleep(0.02)
        is_full = False
        assert (await ended(client, batch)).status == "completed"
        assert "Traceback" not in caplog.text


async def test_a_batch_of_which_every_line_is_refused_is_completed_without_results(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, [a_line(number, model="none") for number in range(3)]))
        assert (batch.status, batch.output_file_id) == ("completed", None)
        assert len(await lines_in(client, batch.error_file_id)) == 3


async def test_a_claim_is_renewed_while_lines_are_put_in_order_and_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals, seen = threading.Semaphore(0), list[str]()
    renew = DirectoryClaim.renew

    def counted(claim: DirectoryClaim) -> None:
        renew(claim)
        renewals.release()

    def slow(name: str) -> None:
        work = getattr(running, name)

        def worked(*given: Any, **named: Any) -> Any:
            # a million lines take minutes
            while renewals.acquire(blocking=False):
                pass
            if all(renewals.acquire(timeout=10) for _ in range(3)):
                seen.append(name)
            return work(*given, **named)

        monkeypatch.setattr(running, name, worked)

    slow("order_of")
    slow("end_job")
    monkeypatch.setattr(DirectoryClaim, "renew", counted)
    monkeypatch.setattr(DirectoryStore, "look_s", 0.02)
    async with a_batch_router(tmp_path) as router, openai_client(router) as client:
        batch = await ended(client, await begun(client, [a_line(0)]))
        assert (batch.status, seen) == ("completed", ["order_of", "end_job"])


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_clock_that_jumps_an_hour_ends_no_batch_and_drops_nothing(tmp_path: Path, jump_s: float) -> None:
    held = asyncio.Event()
    backend = ScriptedBackend(scripts=[an_answer("ok"), [held, *an_answer("ok")]])
    async with a_batch_router(tmp_path, backend) as router, openai_client(router) as client:
        batches = router.operations.batches
        assert batches is not None
        batch = await begun(client, [a_line(0), a_line(1)])
        await until(client, batch, lambda now: (now.request_counts and now.request_counts.completed) == 1)
        unix_time = batches.means.unix_time
        object.__setattr__(batches.means, "unix_time", lambda: unix_time() + jump_s)
        await asyncio.to_thread(batches._sweep)
        held.set()
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert len(await lines_in(client, batch.output_file_id)) == 2

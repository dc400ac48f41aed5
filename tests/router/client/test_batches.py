"""`pointsman batch` as a person uses it, against a router."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from policies.errors import ExpectedError, InvalidRequest
from router.client.batches import BatchClient, ShownBatch, ShownCounts, _details, _Problem, _Problems, _summary, _table
from tests.router.batches.parts import a_batch_router, a_line
from tests.router.parts import KEY, ScriptedBackend, a_router, an_answer

ROOT = Path(__file__).parents[3]


async def pointsman(*arguments: str, key: str = KEY) -> tuple[int, str, str]:
    """Status, stdout and stderr of a real process."""
    command = [sys.executable, "-P", "-m", "router", "batch", *arguments]
    environment = {**os.environ, "POINTSMAN_KEY": key}
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout, done.stderr


def a_file(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


async def test_a_file_is_submitted_awaited_and_its_results_are_written(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router:
        file, out = a_file(tmp_path, a_line(0), a_line(1), a_line(2, model="none")), tmp_path / "out.jsonl"
        status, made, notes = await pointsman("submit", str(file), "--at", router.http_url, "--out", str(out))
        assert (status, "completed: 2 of 3 requests succeeded, 1 failed" in notes) == (0, True), notes
        assert {json.loads(line)["custom_id"] for line in out.read_text().splitlines()} == {"r0", "r1"}
        batch = made.strip()
        status, listed, _ = await pointsman("list", "--at", router.http_url)
        assert (status, batch in listed, "completed" in listed) == (0, True, True)
        status, shown, _ = await pointsman("show", batch, "--at", router.http_url)
        assert (status, "/v1/chat/completions" in shown) == (0, True)
        assert f"pointsman batch results {batch} --errors" in notes
        status, errors, _ = await pointsman("results", batch, "--errors", "--at", router.http_url)
        assert (status, json.loads(errors)["custom_id"]) == (0, "r2")


async def test_a_batch_of_which_no_request_succeeds_has_no_results_and_leads_to_its_errors(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router:
        file, out = a_file(tmp_path, a_line(0, model="none")), tmp_path / "out.jsonl"
        status, made, notes = await pointsman("submit", str(file), "--at", router.http_url, "--out", str(out))
        assert (status, "out.jsonl is not written: no request succeeded" in notes) == (1, True), notes
        status, _, notes = await pointsman("results", made.strip(), "--at", router.http_url)
        assert (status, "see its errors: pointsman batch results batch_" in notes) == (1, True), notes


@pytest.mark.parametrize("columns", [80, 200])
def test_a_list_shows_whole_ids_and_is_as_wide_as_the_terminal_allows(columns: int) -> None:
    counts = ShownCounts(12_000, 9_000, 500)
    batch = ShownBatch("batch_" + "0" * 28, "in_progress", "/v1/embeddings", request_counts=counts)
    batch.estimated_seconds_left = 3_700
    console = Console(width=columns, file=StringIO(), record=True)
    console.print(_table([batch], is_wide=columns > 100))
    shown = console.export_text()
    for text in (batch.id, "in_progress", "9,500/12,000", "500", "1:01:40"):
        assert text in shown
    assert ("/v1/embeddings" in shown) == (columns > 100)


def test_one_batch_is_shown_with_the_mistakes_of_its_file() -> None:
    batch = ShownBatch("batch_1", "failed", errors=_Problems([_Problem("no JSON", 3), _Problem("too large")]))
    assert _details(batch)[-2:] == ["line 3: no JSON", "too large"]
    assert _summary(batch) == "failed: the file has mistakes, and none of its requests was sent"


async def test_a_batch_that_fails_says_why_and_exits_with_1(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router:
        file = a_file(tmp_path, a_line(0), a_line(0))
        status, _, notes = await pointsman("submit", str(file), "--at", router.http_url, "--wait")
        assert (status, "line 2: an earlier line has this `custom_id` too" in notes) == (1, True), notes


async def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    backend = ScriptedBackend(scripts=[[asyncio.Event()]])
    async with a_batch_router(tmp_path, backend) as router, BatchClient(router.http_url, KEY) as client:
        batch = await client.submit(a_file(tmp_path, a_line(0)), "/v1/chat/completions", "24h")
        async with asyncio.timeout(10):
            await backend.began.wait()
        with pytest.raises(InvalidRequest, match="the batch is in_progress"):
            await asyncio.to_thread(_results, router.http_url, batch.id)
        status, said, _ = await pointsman("cancel", batch.id, "--at", router.http_url)
        assert (status, said.strip()) == (0, "cancelling")
        status, _, notes = await pointsman("wait", batch.id, "--at", router.http_url)
        assert (status, "cancelled: 0 of 1 requests succeeded, 1 failed" in notes) == (1, True), notes


def _results(at: str, batch: str) -> None:
    from router.client import batches

    batches.results(BatchClient(at, KEY), batch, None, errors=False)


async def test_lists_longer_than_a_page_are_whole(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path, max_jobs=200) as router, BatchClient(router.http_url, KEY) as client:
        file = a_file(tmp_path, a_line(0))
        made = [(await client.submit(file, "/v1/chat/completions", "24h")).id for _ in range(103)]
        assert [batch.id for batch in await client.newest(102)] == made[:0:-1]


async def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path, ScriptedBackend(scripts=[an_answer("ok")])) as router:
        async with BatchClient(router.http_url, "wrong") as client:
            with pytest.raises(ExpectedError, match="keys are read from"):
                await client.newest(5)
        async with BatchClient(router.http_url, KEY) as client:
            with pytest.raises(ExpectedError, match="cannot be read: No such file"):
                await client.submit(tmp_path / "none", "/v1/chat/completions", "24h")
            with pytest.raises(ExpectedError, match="there is no batch 'x'"):
                await client.show("x")
        status, _, notes = await pointsman("show", "x", "--at", router.http_url)
        assert (status, notes.count("\n"), "pointsman batch list" in notes) == (1, 1, True)
    async with BatchClient(router.http_url, KEY) as client:
        with pytest.raises(ExpectedError, match="no answer from"):
            await client.newest(5)
    async with a_router() as bare, BatchClient(bare.http_url, KEY) as client:
        with pytest.raises(ExpectedError, match="the operator turns them on"):
            await client.newest(5)

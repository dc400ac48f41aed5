"""`pointsman bench` from the command line, against stand-ins."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from policies.errors import BackendFailed, InvalidRequest
from router.client.bench import BenchOptions, run
from router.client.load import Load
from router.start.cli import app
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import TEXT, running


async def bench(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ("bench", *arguments))


@pytest.mark.parametrize("loop", [("--concurrency", "3"), ("--rate", "200")])
async def test_every_request_is_sent_and_the_result_is_printed_and_written(
    tmp_path: Path, loop: tuple[str, str]
) -> None:
    files = ("--picture", str(tmp_path / "b.svg"), "--json", str(tmp_path / "b.json"))
    async with running(OpenAIServer(model="m", cached_tokens=7)) as server:
        done = await bench("--at", server.url, "--requests", "20", "--words", "30", "--max-tokens", "9", *loop, *files)
    assert done.exit_code == 0, done.output
    assert "20 requests to m" in done.output
    assert "20 answered and 0 failed" in done.output
    assert len(server.received) == 20
    assert {seen.body["max_tokens"] for seen in server.received} == {9}
    record = json.loads((tmp_path / "b.json").read_text())
    assert (record["answered"], record["output_tokens"]) == (20, 20 * min(9, len(TEXT)))
    assert (tmp_path / "b.svg").read_text().startswith("<svg")


async def test_a_failed_request_is_shown_and_changes_the_exit_status() -> None:
    async with running(OpenAIServer(is_busy=True)) as server:
        done = await bench("--at", server.url, "--requests", "4")
    assert done.exit_code == 1
    assert "0 answered and 4 failed" in done.output
    assert "failed 4 times: /v1/chat/completions answered 429: Too many requests" in done.output


async def test_a_server_that_does_not_answer_is_an_error_for_people() -> None:
    done = await bench("--at", "http://127.0.0.1:9")
    assert isinstance(done.exception, BackendFailed)


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    async with running(OpenAIServer()) as server:
        for option, path in (("--picture", tmp_path / "no" / "b.svg"), ("--json", tmp_path)):
            done = await bench("--at", server.url, "--requests", "1", option, str(path))
            assert isinstance(done.exception, InvalidRequest)
            assert f"cannot write {path} (name a file in a folder that exists)" in str(done.exception)
    # before the load
    assert not server.received


async def test_a_disk_that_is_full_is_named_and_the_text_is_printed() -> None:
    async with running(OpenAIServer()) as server:
        done = await bench("--at", server.url, "--requests", "1", "--picture", "/dev/full")
    assert isinstance(done.exception, InvalidRequest)
    assert "No space left" in str(done.exception)
    assert "1 answered" in done.output


class ClosedPipe(io.StringIO):
    """What `head` leaves of a pipe."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


async def test_files_are_written_even_if_the_text_is_not_read_to_its_end(tmp_path: Path) -> None:
    async with running(OpenAIServer()) as server:
        load = Load(1, 1, None, 5, 0, 0)
        options = BenchOptions(server.url, load, picture=tmp_path / "b.svg", json=tmp_path / "b.json")
        with redirect_stdout(ClosedPipe()), pytest.raises(BrokenPipeError):
            await asyncio.to_thread(run, options)
    assert json.loads((tmp_path / "b.json").read_text())["answered"] == 1
    assert (tmp_path / "b.svg").exists()


async def test_a_loop_is_open_or_closed() -> None:
    done = await bench("--rate", "5", "--concurrency", "3")
    assert done.exit_code == 2
    assert "leave out one of them" in done.output


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "20000"])
async def test_a_rate_that_cannot_be_kept_is_refused(rate: str) -> None:
    done = await bench("--rate", rate)
    assert done.exit_code == 2
    assert "--rate must be above 0" in done.output

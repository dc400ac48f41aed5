"""`pointsman chat` as a person and as a pipe use it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from policies.errors import InvalidRequest
from router.client import chat
from router.client.chat import ChatOptions, Dialogue, first_model, summary
from router.client.chats import ChatClient, Reply
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import TEXT, running

ROOT = Path(__file__).parents[3]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


async def run(options: ChatOptions) -> None:
    await asyncio.to_thread(chat.run, options)


async def pointsman(*arguments: str, piped: str | None = None) -> tuple[int, str, str]:
    """Status, stdout and stderr of a real process."""
    command = [sys.executable, "-P", "-m", "router", *arguments]
    stdin = subprocess.DEVNULL if piped is None else None
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        input=piped,
        stdin=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=dict(os.environ),
    )
    return done.returncode, done.stdout, done.stderr


async def test_a_pipe_gets_the_answer_alone_and_a_document_comes_before_the_question() -> None:
    async with running(OpenAIServer(model="m", cached_tokens=4)) as server:
        status, answer, notes = await pointsman("chat", "Sum", "up", "--at", server.url, piped="a report\n")
    assert (status, answer) == (0, f"{TEXT}\n")
    assert "first token after" in notes
    assert server.received[0].body["messages"] == [{"role": "user", "content": "a report\n\nSum up"}]


async def test_a_question_needs_no_input() -> None:
    async with running(OpenAIServer()) as server:
        status, answer, _ = await pointsman("chat", "Hello", "--at", server.url, "--system", "Be short.")
    assert (status, answer) == (0, f"{TEXT}\n")
    assert server.received[0].body["messages"][0] == {"role": "system", "content": "Be short."}


async def test_an_error_is_a_sentence_and_an_exit_status() -> None:
    status, answer, notes = await pointsman("chat", "Hello", "--at", "http://127.0.0.1:9")
    assert (status, answer) == (1, "")
    assert notes.startswith("no answer from http://127.0.0.1:9: ")
    assert "Traceback" not in notes


async def test_a_person_goes_on_after_an_error_and_the_conversation_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    async with running(OpenAIServer()) as server:
        typed = iter(["first", "second", "third", ""])

        def line(prompt: str) -> str:
            text = next(typed)
            server.is_busy = text == "second"
            return text

        monkeypatch.setattr("builtins.input", line)
        await run(ChatOptions(server.url))
    contents = [[message["content"] for message in seen.body["messages"]] for seen in server.received]
    assert contents == [["first"], ["first", TEXT, "second"], ["first", TEXT, "third"]]
    written = capsys.readouterr()
    assert written.out == f"{TEXT}\n" * 2
    assert "answered 429: Too many requests" in written.err


async def test_the_end_of_the_input_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", end)
    async with running(OpenAIServer()) as server:
        await run(ChatOptions(server.url))
    assert server.received == []


@pytest.mark.parametrize(
    ("piped", "sentence"), [("", "there is no question"), ("x" * (8 << 20) + "x", "is longer than")]
)
def test_an_input_without_a_question_or_without_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, piped: str, sentence: str
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(piped))
    with pytest.raises(InvalidRequest, match=sentence):
        chat.run(ChatOptions("http://127.0.0.1:9"))


async def test_a_router_without_models_is_an_error() -> None:
    class Empty(OpenAIServer):
        async def list_models(self, request: object) -> object:  # type: ignore[override]
            from aiohttp import web

            return web.json_response({"object": "list", "data": []})

    async with running(Empty()) as server, ChatClient(server.url) as client:
        with pytest.raises(InvalidRequest, match="serves no model yet"):
            await first_model(client)


async def test_a_question_that_fails_leaves_the_conversation_as_it_was() -> None:
    async with running(OpenAIServer(is_busy=True)) as server, ChatClient(server.url) as client:
        conversation = Dialogue(client, "m")
        with pytest.raises(InvalidRequest):
            await conversation.ask("Hello", lambda _: None)
    assert conversation.messages == []


def test_the_line_behind_an_answer_has_place_cache_and_times() -> None:
    reply = Reply("x", 0.0151, 0.1151, 1740, 1728, 11, "length", {"backend": "own-1", "class": "long-rag"})
    assert summary(reply) == (
        "own-1 · long-rag · 1,740 prompt tokens, 1,728 of them cached (99%) · first token after 15 ms · "
        "11 tokens, 100 per second · ended by length"
    )
    assert summary(Reply("x", 0.2, 0.2, 0, None, 1, "stop", {})) == "first token after 200 ms"

"""`pointsman chat`: a conversation in a terminal, or one question in a pipe."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from policies.errors import ExpectedError, InvalidRequest
from router.client.chats import KEY_VARIABLE, ChatClient, Reply
from router.terminal import inert_console
from tls.settings import TlsSettings

_MOST_PIPED = 8 << 20
"""Characters of a question that comes through a pipe."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Where to chat, with which model (None: the only one, or the first), and how."""

    at: str
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    question: str | None = None
    tls: TlsSettings | None = None


@dataclass(slots=True)
class Dialogue:
    """A conversation that has so many messages by now; each answer is added with its question.

    A question that is not answered leaves it as it was.
    """

    client: ChatClient
    model: str
    max_tokens: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    async def ask(self, question: str, on_text: Callable[[str], None]) -> Reply:
        """The answer to `question`. Raises ExpectedError."""
        asked = [*self.messages, {"role": "user", "content": question}]
        reply = await self.client.chat(asked, self.model, max_tokens=self.max_tokens, on_text=on_text)
        self.messages = [*asked, {"role": "assistant", "content": reply.text}]
        return reply


def run(options: ChatOptions) -> None:
    """Chat as `options` say, until the end of the input. Raises ExpectedError if the question is not answered."""
    question = _question(options.question, sys.stdin)
    asyncio.run(_chat(options, question))


async def _chat(options: ChatOptions, question: str | None) -> None:
    async with ChatClient(options.at, os.environ.get(KEY_VARIABLE), tls=options.tls) as client:
        model = options.model or await first_model(client)
        conversation = Dialogue(client, model, options.max_tokens)
        if options.system:
            conversation.messages.append({"role": "system", "content": options.system})
        if question is not None:
            await _turn(conversation, question)
            return
        _note(f"{model} at {options.at}; an empty line or Ctrl-D ends the chat")
        while question := await asyncio.to_thread(_typed):
            try:
                await _turn(conversation, question)
            except ExpectedError as error:
                # a terminal goes on: the next question may be answered
                _note(str(error))


async def first_model(client: ChatClient) -> str:
    """The first model that the server lists. Raises InvalidRequest if it lists none."""
    models = await client.models()
    if not models:
        raise InvalidRequest("the router serves no model yet", hint="wait for a backend, or name one with --model")
    return models[0]


async def _turn(conversation: Dialogue, question: str) -> None:
    reply = await conversation.ask(question, _show)
    _show("" if reply.text.endswith("\n") else "\n")
    _note(summary(reply))


def summary(reply: Reply) -> str:
    """One line about `reply`: backend, class, cached tokens and times."""
    parts = [reply.headers[name] for name in ("backend", "class") if name in reply.headers]
    if reply.prompt_tokens:
        cached = reply.cached_tokens
        share = "" if cached is None else f", {cached:,} of them cached ({cached / reply.prompt_tokens:.0%})"
        parts.append(f"{reply.prompt_tokens:,} prompt tokens{share}")
    parts.append(f"first token after {reply.first_s * 1000:.0f} ms")
    if reply.tpot_s:
        parts.append(f"{reply.output_tokens:,} tokens, {1 / reply.tpot_s:.0f} per second")
    if reply.finish not in (None, "stop"):
        parts.append(f"ended by {reply.finish}")
    return " · ".join(parts)


def _question(given: str | None, stdin: TextIO) -> str | None:
    """The piped text if there is any, followed by the question of the command line; None: it is typed.

    Raises InvalidRequest for a pipe without a text, or with a very long one.
    """
    if stdin.isatty():
        return given
    if given is not None and not _is_piped(stdin):
        # nothing that ends: the input of a service, say
        return given
    piped = stdin.read(_MOST_PIPED + 1)
    if len(piped) > _MOST_PIPED:
        raise InvalidRequest(f"the input is longer than {_MOST_PIPED:,} characters", hint="send a part of it")
    whole = "\n\n".join(part for part in (piped.strip(), given) if part)
    if not whole:
        raise InvalidRequest("there is no question", hint="write it behind `pointsman chat`, or pipe it")
    return whole


def _is_piped(stdin: TextIO) -> bool:
    try:
        mode = os.fstat(stdin.fileno()).st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _typed() -> str:
    """One line of a person; empty at the end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    """Write about an answer, where a pipe does not take it for a part of it."""
    inert_console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim")

"""FastChat's workers, called as its controller calls them. Written for 0.2.30 to 0.2.36; dormant upstream.

A worker takes a prompt as text: a text completion goes there unchanged, a chat is first put into the worker's own
conversation template. A worker silently truncates prompts that are too long, so the worker counts each one first
(`/count_token`) and this adapter refuses it. Answers are cumulative: each frame repeats the whole text. A closed
connection stops generation. A controller can stand in for a worker; it reports neither template nor length, so it gets
texts only.

Source: FastChat's controller, base worker and model worker (their HTTP API); its OpenAI server for their requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from backends.base import Load
from backends.fastchat.answer import FastChatAnswer
from backends.fastchat.template import Conversation, conversation_of, rendered
from backends.http.backend import HttpBackend
from backends.http.exchange import Exchange, HttpOptions, Post, decoded, encoded
from backends.http.unsupported import refuse_unknown, refuse_unsupported
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest, Overflow
from policies.nouns import Delta, Prompt, Request

_DETAILS, _COUNT = "/model_details", "/count_token"
_CHAT_PATH = "/v1/chat/completions"
_OF_ALL = ("temperature", "top_p", "top_k", "stop", "stop_token_ids")
_OF_TRANSFORMERS = (*_OF_ALL, "repetition_penalty")
_OF_VLLM = (*_OF_ALL, "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class FastChatOptions(HttpOptions):
    """How to talk to a worker. `vllm_worker`: it is FastChat's vLLM worker, which knows other penalties."""

    vllm_worker: bool = False


class FastChat(HttpBackend):
    """A FastChat worker, or a controller, at `url`. It has no capability."""

    kind = "fastchat"
    options_type = FastChatOptions
    _options: FastChatOptions

    def __init__(
        self,
        name: str,
        url: str,
        *,
        pool: str,
        options: HttpOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, url, pool=pool, options=options, clock=clock)
        self._conversations: dict[str, Conversation] = {}
        self._is_controller = False

    async def probe(self) -> None:
        """Learn models, templates and load; raises BackendFailed if it is ill."""
        asked_at = self._clock()
        status = decoded(await self.client.ask(Post("/worker_get_status", b"{}")), self.name, "its status")
        try:
            names = frozenset(map(str, status["model_names"]))
            self._loads = (load_of(status, asked_at, self._options.max_requests),)
        except (KeyError, TypeError, ValueError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its status") from error
        await self._learn_models(names)
        self._served = self._options.served or names

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The worker's body. Raises InvalidRequest for fields that FastChat does not support."""
        if prompt.body is None:
            raise InvalidRequest("FastChat takes text, and the request has token ids only", param="prompt")
        refuse_unknown(prompt.body, (), "FastChat")
        known = _OF_VLLM if self._options.vllm_worker else _OF_TRANSFORMERS
        refuse_unsupported(request.sampling, known, "FastChat's worker")
        model = self._backends_name(request)
        conversation = self._conversations.get(model)
        is_chat = prompt.path == _CHAT_PATH
        text = rendered(prompt.body["messages"], conversation) if is_chat else _text(prompt.body)
        body = worker_body(request, model, text, conversation if is_chat else None)
        answer = FastChatAnswer(self.name, prompt_tokens=request.prompt_tokens)
        return Exchange(Post("/worker_generate_stream", encoded(body)), answer)

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Stream the answer, once the worker has counted the prompt; closing the iterator closes the connection.

        Raises the errors of other kinds, and ContextExceeded for a prompt that the worker would truncate.
        """
        exchange = self._made(request, prompt)
        if not self._is_controller:
            body = msgspec.json.decode(exchange.post.content)
            body["max_new_tokens"] = min(request.max_new_tokens, await self._room(request, prompt, exchange.post))
            exchange = exchange._replace(post=exchange.post._replace(content=encoded(body)))
        async with aclosing(self.client.stream(exchange, prompt.headers, request.deadline_s)) as deltas:
            async for delta in deltas:
                yield delta

    async def _room(self, request: Request, prompt: Prompt, post: Post) -> int:
        """Tokens that the answer to `post` may have without the worker cutting its prompt. Raises ContextExceeded."""
        # both ignore unknown fields
        pages = await asyncio.gather(*(self.client.ask(Post(path, post.content)) for path in (_DETAILS, _COUNT)))
        details, counted = (decoded(page, self.name, "a prompt's length") for page in pages)
        try:
            context, tokens = int(details["context_length"]), int(counted["count"])
        except (KeyError, TypeError, ValueError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for a prompt's length") from error
        # the worker keeps one token for itself
        room = context - tokens - 1
        body = prompt.body or {}
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        if room < (asked or 1):
            limit = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
            raise ContextExceeded.of(
                Overflow(tokens, asked, context),
                where=f" of '{request.model}'",
                hint=f"ask for at most {room} tokens" if room > 0 else "shorten the prompt",
                param=limit if room > 0 else None,
            )
        return room

    async def _learn_models(self, names: frozenset[str]) -> None:
        """Templates and context of a worker's models; a controller has neither."""
        lengths, conversations = [], {}
        for name in names:
            asked = encoded({"model": name})
            page = await self.client.ask(Post(_DETAILS, asked))
            self._is_controller = page.status == 404
            if self._is_controller:
                return
            details = decoded(page, self.name, f"the length of '{name}'")
            page = await self.client.ask(Post("/worker_get_conv_template", asked))
            conversations[name] = conversation_of(decoded(page, self.name, f"the template of '{name}'"))
            if isinstance(details, dict) and isinstance(length := details.get("context_length"), int):
                lengths.append(length)
        self._conversations = conversations
        self._context_tokens = self._options.context_tokens or min(lengths, default=None)


def worker_body(request: Request, model: str, text: str, conversation: Conversation | None) -> dict[str, Any]:
    """The body of `/worker_generate_stream`; a template's own stops are added to the client's."""
    sampling = request.sampling
    stops = (*sampling.stop, *(conversation.stops if conversation else ()))
    ids = (*sampling.stop_token_ids, *(conversation.stop_token_ids if conversation else ()))
    return {
        "model": model,
        "prompt": text,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_new_tokens": request.max_new_tokens,
        "echo": False,
        "stop": list(dict.fromkeys(stops)),
        "stop_token_ids": list(dict.fromkeys(ids)),
    }


def load_of(status: Mapping[str, Any], asked_at: float, max_requests: int | None) -> Load:
    """The load in a status: a worker's requests, and the waiting ones among them if the running number is known."""
    there = int(status["queue_length"])
    if max_requests is None:
        return Load(running=there, reported_at=asked_at)
    running = Load(running=min(there, max_requests), reported_at=asked_at)
    return replace(running, waiting=max(0, there - max_requests), max_requests=max_requests)


def _text(body: Mapping[str, Any]) -> str:
    text = body.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequest("FastChat takes text, and the prompt is token ids", hint="send text", param="prompt")
    return text

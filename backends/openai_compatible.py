"""Any server that speaks OpenAI's API. What the client sent goes there untouched, unknown fields included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from backends.base import Description, Load
from backends.openai_answer import OpenAIAnswer
from backends.openai_errors import error_of
from backends.openai_prompt import Post, post_of
from policies.errors import BackendFailed, DeadlineExceeded
from policies.nouns import Capability, Delta, Prompt, Request

_LAST_CHUNK_S = 0.1


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """How to talk to the server.

    `models` maps clients' names of models to the server's; `served` are the names that it serves, if it should not be
    asked. `always_stream` streams from it whatever the client asked, so that the first token's time is seen and a
    cancelled request stops. `takes_token_ids`: its completions accept a prompt of ids. `idle_s` is the longest silence
    in an answer.
    """

    key: str | None = field(default=None, repr=False)
    models: Mapping[str, str] = field(default_factory=dict)
    served: frozenset[str] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict)
    always_stream: bool = True
    takes_token_ids: bool = True
    max_requests: int | None = None
    context_tokens: int | None = None
    connect_s: float = 5.0
    idle_s: float = 600.0
    probe_s: float = 5.0


class OpenAICompatible:
    """A server at `url` (http://host:port, with or without the trailing /v1)."""

    kind = "openai_compatible"

    def __init__(self, name: str, url: str, *, pool: str, options: OpenAIOptions | None = None) -> None:
        self.name, self.pool = name, pool
        self.url = url.rstrip("/").removesuffix("/v1")
        self.open_requests = 0
        self._options = options or OpenAIOptions()
        self._served, self._context_tokens = self._options.served, self._options.context_tokens
        self._http: aiohttp.ClientSession | None = None
        self._replies: set[aiohttp.ClientResponse] = set()

    def __repr__(self) -> str:
        return f"<OpenAICompatible {self.name} of {self.pool} at {self.url}: {self.open_requests} requests>"

    def describe(self) -> Description | None:
        """The models that it was configured with or named itself; None until either is known."""
        aliases = self._options.models.items()
        models = self._served | {ours for ours, theirs in aliases if theirs in self._served or not self._served}
        if not models:
            return None
        # such a server refuses what it cannot do by itself
        return Description(models, context_tokens=self._context_tokens, capabilities=frozenset(Capability))

    def load(self) -> Load:
        """Only what was configured: the dialect has no report."""
        return Load(max_requests=self._options.max_requests)

    def assets(self) -> Mapping[str, bytes]:
        """Nothing: the server keeps its files to itself."""
        return {}

    async def start(self) -> None:
        """Make ready; connections are opened when they are needed."""
        self._session()

    async def close(self) -> None:
        """Close every connection, which cancels what runs."""
        for reply in tuple(self._replies):
            # a session that closes does not wake who reads a body
            reply.close()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def probe(self) -> None:
        """Ask for the models; raises BackendFailed if they do not come."""
        timeout = aiohttp.ClientTimeout(total=self._options.probe_s)
        headers = self._headers({})
        try:
            async with self._session().get(f"{self.url}/v1/models", headers=headers, timeout=timeout) as reply:
                body = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if reply.status != 200:
            raise BackendFailed(f"{self.name} answered {reply.status} when asked for its models")
        self._learn(body)

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        """Forward the client's own body and stream the answer; closing the iterator closes the connection.

        Raises BackendFailed, BackendRefused, InvalidRequest, ContextExceeded, DeadlineExceeded.
        """
        post = post_of(
            request,
            prompt,
            models=self._options.models,
            always_stream=self._options.always_stream,
            takes_token_ids=self._options.takes_token_ids,
        )
        answer = OpenAIAnswer(self.name, request, is_streamed=post.is_streamed)
        self.open_requests += 1
        try:
            reply = await self._send(request, prompt, post)
            self._replies.add(reply)
            try:
                async for data in reply.content.iter_any():
                    for delta in answer.feed(data):
                        yield delta
                    if answer.is_over:
                        break
                for delta in answer.end():
                    yield delta
                await _read_to_end(reply)
            finally:
                # A connection whose body was read to its end went back to the pool by itself; any other is closed.
                reply.close()
                self._replies.discard(reply)
        except aiohttp.ServerTimeoutError as error:
            raise self._unreachable(error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.name} could not finish before the deadline") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        finally:
            self.open_requests -= 1

    async def _send(self, request: Request, prompt: Prompt, post: Post) -> aiohttp.ClientResponse:
        """The reply to `post`, at its body. Raises what another status than 200 means."""
        options = self._options
        timeout = aiohttp.ClientTimeout(
            total=request.deadline_s, sock_connect=options.connect_s, sock_read=options.idle_s
        )
        headers = {"content-type": "application/json", **self._headers(prompt.headers)}
        reply = await self._session().post(
            self.url + post.path, data=post.content, headers=headers, timeout=timeout, allow_redirects=False
        )
        if reply.status == 200:
            return reply
        async with reply:
            raise error_of(self.name, reply.status, await reply.read(), reply.headers)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # The router bounds what runs, by tenant and by backend; a limit here would hide a queue from it.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._http

    def _headers(self, of_request: Mapping[str, str]) -> dict[str, str]:
        key = {"authorization": f"Bearer {self._options.key}"} if self._options.key else {}
        return {**self._options.headers, **of_request, **key}

    def _learn(self, body: bytes) -> None:
        """Take names and context from the answer to GET /v1/models (`max_model_len` is vLLM's)."""
        try:
            models = msgspec.json.decode(body)["data"]
            names = frozenset(str(model["id"]) for model in models)
            lengths = [length for model in models if isinstance(length := model.get("max_model_len"), int)]
        except (KeyError, TypeError, AttributeError, msgspec.DecodeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its models") from error
        self._served = self._options.served or names
        if self._options.context_tokens is None and lengths:
            self._context_tokens = min(lengths)

    def _unreachable(self, error: BaseException) -> BackendFailed:
        return BackendFailed(
            f"{self.name} cannot be reached: {error or type(error).__name__}", hint=f"is {self.url} up?"
        )


async def _read_to_end(reply: aiohttp.ClientResponse) -> None:
    """Let the connection be used again, if the server ends its reply soon after it said that it was done."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(_LAST_CHUNK_S):
            await reply.read()

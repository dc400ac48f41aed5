"""Any server with OpenAI's API. The client's body is passed on unchanged, unknown fields included."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from backends.base import Prefilled
from backends.http.backend import Forward, HttpBackend, native_post
from backends.http.errors import error_of
from backends.http.exchange import Answer, Exchange, HttpOptions, WholeBody, decoded
from backends.messages.answer import MESSAGES_PATH
from backends.messages.passed import PassedMessage, PassedWholeMessage
from backends.openai.answer import OpenAIAnswer, ReadWhole
from backends.openai.calls import call_ids_in
from backends.openai.continued import rest_of
from backends.openai.endpoints import PATH as OPENAPI_PATH
from backends.openai.endpoints import Endpoints, endpoints_in
from backends.openai.passed import Ear, PassedStream, PassedWhole
from backends.openai.pooled import POOLED, PooledAnswer, pooled_post
from backends.openai.prefill import PrefillAnswer, prefill_post
from backends.openai.prompt import post_of, with_usage
from backends.openai.responses import RESPONSES_PATH, PassedResponse, PassedWholeResponse
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Capability, Prompt, Request

RARE = frozenset({Capability.SUFFIX, Capability.PROMPT_LOGPROBS})
"""Features that many servers of completions accept and ignore."""

_TEXT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})

_BY_ENDPOINT = ((RESPONSES_PATH, Capability.RESPONSES), (MESSAGES_PATH, Capability.MESSAGES))
"""Paths that only some servers have, and the ability that comes with each."""

SLOWEST_TOKEN_S = 0.05
"""How much longer than `idle_s` a server may be silent over an answer in one piece, for each token that it may have."""


@dataclass(frozen=True, slots=True)
class OpenAIOptions(HttpOptions):
    """How to talk to a server that speaks OpenAI's dialect.

    `takes_token_ids`: its completions accept a prompt of ids.
    """

    takes_token_ids: bool = True


class OpenAICompatible(HttpBackend):
    """A server at `url` (http://host:port, with or without the trailing /v1)."""

    kind = "openai_compatible"
    options_type = OpenAIOptions
    _options: OpenAIOptions
    # such a server rejects unsupported requests itself
    capabilities = frozenset(Capability) - {
        *(Capability.PINS, Capability.CONTINUES_TOKENS, Capability.CONTINUES_TEXT),
        *(Capability.RESPONSES, Capability.MESSAGES),
    }
    own_paths = frozenset({"/v1/chat/completions", "/v1/completions", *POOLED})
    _passes_on: ClassVar[bool] = True
    """Its answers have the form that clients of the dialect expect, and may be passed on unchanged."""
    _always_streams: ClassVar[bool] = False
    """A closed connection stops it in a stream only, and its answers are written anew in any case."""
    _echoes: ClassVar[bool] = False
    """Its completions know `echo`."""
    _dispensable: ClassVar[frozenset[str]] = frozenset()
    """Own fields that an endpoint may do without."""
    _endpoints: Endpoints | None = None
    """Its endpoints besides chats and texts; None: not asked yet."""

    async def probe(self) -> None:
        """Ask for the models; raises BackendFailed if they do not come."""
        await self._learn_models()

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's own body, read as OpenAI's answers are."""
        return self._openai_exchange(request, prompt, self._own_fields(request))

    def forward(self, request: Request, path: str) -> Forward:
        """The router's own fields are set here too: they decide about shared KV and priority."""
        own = self._own_fields(request)
        if path in POOLED:
            own = dict.fromkeys(own)
        there = super().forward(request, path)
        return there._replace(fields={**there.fields, **own}, error_of=self._error_of)

    def _openai_exchange(self, request: Request, prompt: Prompt, own: Mapping[str, Any]) -> Exchange:
        """The client's own request with the fields `own`; its answer goes back as it comes, if that may be."""
        native = prompt.native
        if native is None or not self._passes_on or prompt.beginning is not None:
            return self._rendered_exchange(request, prompt, own)
        body, path = native.body, native.path
        # if the server does not repeat the prompt itself, the router does
        is_whole = body is prompt.body or self._echoes
        if not (is_whole if path in _TEXT_PATHS else self._has_endpoint(path, own)):
            return self._rendered_exchange(request, prompt, own)
        members: dict[str, Any] = {"model": self._options.models.get(request.model, request.model)}
        is_streamed = bool(body.get("stream"))
        if is_streamed and path in _TEXT_PATHS:
            members |= with_usage(body)
        members |= own
        post = native_post(native, members, is_streamed=is_streamed)
        shown_model = None if members["model"] == body["model"] else body["model"]
        answer: Answer | WholeBody
        if path == MESSAGES_PATH:
            answer = (PassedMessage if is_streamed else PassedWholeMessage)(self.name, shown_model=shown_model)
        elif path == RESPONSES_PATH:
            answer = (PassedResponse if is_streamed else PassedWholeResponse)(self.name, shown_model=shown_model)
        else:
            ear = Ear(self.name, request.prompt_tokens, request.sampling.choices, shown_model)
            shows_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            answer = PassedStream(ear, shows_usage=shows_usage) if is_streamed else PassedWhole(ear)
        quiet_s = 0.0 if is_streamed else request.max_new_tokens * SLOWEST_TOKEN_S
        return Exchange(post, answer, self._error_of, quiet_s=quiet_s)

    def _rendered_exchange(self, request: Request, prompt: Prompt, own: Mapping[str, Any]) -> Exchange:
        """An exchange with an answer that the router reads, or renders for the client."""
        native = prompt.native
        if native is not None and native.untranslated is not None and native.body is not prompt.body:
            raise native.untranslated
        if prompt.path in POOLED and prompt.body is not None:
            post = pooled_post(prompt.path, prompt.body, self._backends_name(request), without=own)
            return Exchange(post, PooledAnswer(self.name, prompt.path, request.prompt_tokens), self._error_of)
        beginning = prompt.beginning
        if beginning is not None:
            request, prompt = rest_of(request, prompt)
        is_streamed = request.stream or bool((prompt.body or {}).get("stream")) or self._always_streams
        post = post_of(
            request,
            prompt,
            model=self._backends_name(request),
            is_streamed=is_streamed,
            takes_token_ids=self._options.takes_token_ids,
            own=own,
        )
        taken_ids = call_ids_in(prompt.body)
        answer = OpenAIAnswer(self.name, request, is_streamed=is_streamed, beginning=beginning, taken_ids=taken_ids)
        quiet_s = 0.0 if is_streamed else request.max_new_tokens * SLOWEST_TOKEN_S
        return Exchange(post, answer if is_streamed else ReadWhole(answer), self._error_of, quiet_s=quiet_s)

    def _has_endpoint(self, path: str, own: Mapping[str, Any]) -> bool:
        """Whether the server has `path`, and that takes all that the router has to say: the fields `own`."""
        fields = (self._endpoints or {}).get(path)
        needed = {name for name, value in own.items() if value is not None} - self._dispensable
        return fields is not None and needed <= fields

    @property
    def _able(self) -> frozenset[Capability]:
        return self.capabilities | {able for path, able in _BY_ENDPOINT if path in (self._endpoints or ())}

    @property
    def _may_answer_whole(self) -> bool:
        return not self._always_streams

    @staticmethod
    def _error_of(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
        """The error of a reply other than 200."""
        return error_of(backend, status, body, headers)

    async def _prefilled(
        self, request: Request, prompt: Prompt, fields: Mapping[str, Any], answer: PrefillAnswer
    ) -> Prefilled:
        """What the server says in `answer` when it has computed `prompt`, sent with `fields` in place of the client's.

        Cancelling this aborts it there. Raises as `generate` does.
        """
        fields = {**self._own_fields(request), "model": self._backends_name(request), **fields}
        exchange = Exchange(prefill_post(request, prompt, fields), answer, self._error_of)
        headers = {**prompt.headers, **self._rank_headers}
        # not asked as a small question: closing the iterator closes the connection, which aborts it there
        async with aclosing(self.client.stream(exchange, headers, request.deadline_s)) as deltas:
            async for _ in deltas:
                pass
        return answer.prefilled

    def _own_fields(self, request: Request) -> Mapping[str, Any]:  # noqa: ARG002 - kinds of this kind look at it
        """Fields that the router sets, in place of the client's; a field with None is not sent."""
        return {}

    async def _learn_models(self) -> None:
        """Take names, context, checkpoints and adapters from GET /v1/models.

        `max_model_len` and `root` are vLLM's, LMDeploy's and SGLang's; an adapter has a `parent`.
        """
        try:
            page = decoded(await self.client.get("/v1/models"), self.name, "its models")
        except BackendFailed:
            # the server may come back as another version
            self._endpoints = None
            raise
        try:
            models = page["data"]
            names = frozenset(str(model["id"]) for model in models)
            adapters = frozenset(str(model["id"]) for model in models if model.get("parent"))
            lengths = [length for model in models if isinstance(length := model.get("max_model_len"), int)]
            roots = {str(model["id"]): (model.get("root"), model.get("parent")) for model in models}
        except (KeyError, TypeError, AttributeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its models") from error
        self._served, self._adapters = self._options.served or names, adapters
        self._roots = _of_whole_models(roots)
        if self._options.context_tokens is None and lengths:
            self._context_tokens = min(lengths)
        if self._endpoints is None:
            self._endpoints = await self._learn_endpoints()

    async def _learn_endpoints(self) -> Endpoints:
        """The server's endpoints, from its OpenAPI document; empty if it has none."""
        try:
            page = await self.client.get(OPENAPI_PATH)
        except BackendFailed:
            return {}
        return endpoints_in(page.body) if page.status == 200 else {}

    async def _check_health(self, path: str = "/health") -> None:
        """As for other servers; after an outage the endpoints are asked again."""
        try:
            await super()._check_health(path)
        except BackendFailed:
            self._endpoints = None
            raise


def _of_whole_models(roots: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    """Model -> its checkpoint, of (root, parent) by model; an adapter reads text as the model that it is of."""
    found = {name: roots.get(parent, (None, None))[0] if parent else root for name, (root, parent) in roots.items()}
    return {name: root for name, root in found.items() if isinstance(root, str) and root}

"""Any server that speaks OpenAI's API. What the client sent goes there untouched, unknown fields included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.embeddings import EMBEDDINGS_PATH, EmbeddingsAnswer, embeddings_post
from backends.http import Exchange, HttpOptions, decoded
from backends.http_backend import Forward, HttpBackend
from backends.openai_answer import OpenAIAnswer
from backends.openai_errors import error_of
from backends.openai_prompt import post_of
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Capability, Prompt, Request


@dataclass(frozen=True, slots=True)
class OpenAIOptions(HttpOptions):
    """How to talk to a server that speaks OpenAI's dialect.

    `always_stream` streams from it whatever the client asked, so that the first token's time is seen and a cancelled
    request stops. `takes_token_ids`: its completions accept a prompt of ids.
    """

    always_stream: bool = True
    takes_token_ids: bool = True


class OpenAICompatible(HttpBackend):
    """A server at `url` (http://host:port, with or without the trailing /v1)."""

    kind = "openai_compatible"
    options_type = OpenAIOptions
    _options: OpenAIOptions
    # such a server refuses what it cannot do by itself
    capabilities = frozenset(Capability)
    own_paths = frozenset({"/v1/chat/completions", "/v1/completions", EMBEDDINGS_PATH})

    async def probe(self) -> None:
        """Ask for the models; raises BackendFailed if they do not come."""
        await self._learn_models()

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's own body, read as OpenAI's answers are."""
        return self._openai_exchange(request, prompt, self._own_fields(request))

    def forward(self, request: Request, path: str) -> Forward:
        """Own fields are said here too: they decide whose KV is shared and who goes first."""
        own = self._own_fields(request)
        if path == EMBEDDINGS_PATH:
            own = dict.fromkeys(own)
        there = super().forward(request, path)
        return there._replace(fields={**there.fields, **own}, error_of=self._error_of)

    def _openai_exchange(self, request: Request, prompt: Prompt, own: Mapping[str, Any]) -> Exchange:
        if prompt.path == EMBEDDINGS_PATH and prompt.body is not None:
            post = embeddings_post(prompt.body, self._backends_name(request), without=own)
            return Exchange(post, EmbeddingsAnswer(self.name, prompt_tokens=request.prompt_tokens), self._error_of)
        post = post_of(
            request,
            prompt,
            models=self._options.models,
            always_stream=self._options.always_stream,
            takes_token_ids=self._options.takes_token_ids,
            own=own,
        )
        return Exchange(post, OpenAIAnswer(self.name, request, is_streamed=post.is_streamed), self._error_of)

    @staticmethod
    def _error_of(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
        """What a reply that is no 200 means."""
        return error_of(backend, status, body, headers)

    def _own_fields(self, request: Request) -> Mapping[str, Any]:  # noqa: ARG002 - kinds of this kind look at it
        """Fields that the router says, whatever the client said; one that is None is not sent at all."""
        return {}

    async def _learn_models(self) -> None:
        """Take names and context from GET /v1/models (`max_model_len` is vLLM's, LMDeploy's and SGLang's)."""
        page = decoded(await self.client.get("/v1/models"), self.name, "its models")
        try:
            models = page["data"]
            names = frozenset(str(model["id"]) for model in models)
            lengths = [length for model in models if isinstance(length := model.get("max_model_len"), int)]
        except (KeyError, TypeError, AttributeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its models") from error
        self._served = self._options.served or names
        if self._options.context_tokens is None and lengths:
            self._context_tokens = min(lengths)

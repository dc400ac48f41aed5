"""Ollama. Written for 0.12.4 to 0.14; earlier ones silently truncate long prompts.

Requests go to its native `/api/chat` and `/api/generate`, because its OpenAI dialect has neither `num_ctx` nor
`truncate`. Fields are translated to Ollama's (`backends/ollama/body.py`); unsupported ones are refused by name. Every
request sets `num_ctx`, so that the context is the one that was checked here; a value that changes from request to
request would make Ollama load the model again each time. `truncate` and `shift` are false: a prompt that is too long
is an error, not cut. A closed connection stops generation. Ollama reports no queue: the router's own counts stand in.

Source: Ollama's docs/api.md (chat, generate, tags, show, ps, version), docs/faq ("context window", "keep_alive").
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backends.http.backend import HttpBackend
from backends.http.exchange import Exchange, HttpOptions, Post, decoded, encoded
from backends.ollama.answer import OllamaAnswer, error_of_ollama
from backends.ollama.body import chat_body, generate_body
from backends.openai.calls import call_ids_in
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest, Overflow
from policies.nouns import Capability, Prompt, Request

USUAL_NUM_CTX = 4096
"""Context requested if neither the pool, the Modelfile nor a loaded model sets one: Ollama's own minimum."""

FIRST_VERSION = (0, 12, 4)
"""The first that knows `truncate`."""

_CHAT_PATH = "/v1/chat/completions"
_NUM_CTX = re.compile(r"^num_ctx\s+(\d+)", re.MULTILINE)
_NUMBER = re.compile(r"-?\d+")
_LATEST = ":latest"


@dataclass(frozen=True, slots=True)
class OllamaOptions(HttpOptions):
    """How to talk to Ollama.

    `num_ctx` is the context that every request asks for; without it, that of the loaded model, or of its Modelfile, or
    4096. `keep_alive` is how long a model stays loaded after a request: seconds, a duration such as `30m`, or -1 for
    ever. `raw`: a text completion is continued as it is, not put into the model's template.
    """

    num_ctx: int | None = None
    keep_alive: str | None = None
    raw: bool = True


class Ollama(HttpBackend):
    """An Ollama server at `url`, with all its models that can complete."""

    kind = "ollama"
    options_type = OllamaOptions
    _options: OllamaOptions
    capabilities = frozenset({Capability.STRUCTURED_OUTPUT, Capability.LOGPROBS, Capability.MEDIA, Capability.SUFFIX})

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
        self._is_new_enough = False
        self._shown: dict[str, _Shown] = {}
        self._contexts: dict[str, int] = {}

    async def probe(self) -> None:
        """Learn models and their contexts; raises BackendFailed if it is ill or too old to keep prompts whole."""
        if not self._is_new_enough:
            await self._check_version()
        digests = await self._digests()
        loaded = await self._loaded()
        self._shown = {name: shown for name, shown in self._shown.items() if digests.get(name) == shown.digest}
        for name, digest in digests.items():
            if name not in self._shown:
                self._shown[name] = await self._show(name, digest)
        usable = {name: shown for name, shown in self._shown.items() if shown.completes}
        self._contexts = {name: self._context_of(shown, loaded.get(name)) for name, shown in usable.items()}
        served = self._options.served or frozenset(usable)
        self._served = frozenset(served | {name.removesuffix(_LATEST) for name in served})
        lengths = [self._context(name) for name in served]
        self._context_tokens = self._options.context_tokens or max(lengths, default=None)

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """A chat to `/api/chat`, a text to `/api/generate`.

        Raises InvalidRequest for unsupported fields, ContextExceeded for a prompt that Ollama would truncate.
        """
        body = prompt.body
        if body is None:
            raise InvalidRequest("Ollama takes text, and the request has token ids only", param="prompt")
        model = self._backends_name(request)
        num_ctx = self._context(model)
        total = request.prompt_tokens + request.max_new_tokens
        # a length that was not counted is only a guess; there Ollama itself refuses
        if prompt.token_ids and total > num_ctx:
            raise ContextExceeded.of(
                Overflow(request.prompt_tokens, request.max_new_tokens, num_ctx),
                where=f" of '{model}'",
                hint="shorten the prompt, or raise the pool's num_ctx",
            )
        is_chat = prompt.path == _CHAT_PATH
        sent = chat_body(request, body) if is_chat else generate_body(request, body, is_raw=self._options.raw)
        sent["model"] = model
        sent["options"]["num_ctx"] = num_ctx
        if self._options.keep_alive is not None:
            sent["keep_alive"] = _duration(self._options.keep_alive)
        counted = request.prompt_tokens if prompt.token_ids else None
        one_call = body.get("parallel_tool_calls") is False
        answer = OllamaAnswer(
            self.name,
            prompt_tokens=request.prompt_tokens,
            counted=counted,
            one_call=one_call,
            taken_ids=call_ids_in(body),
        )
        path = "/api/chat" if is_chat else "/api/generate"
        return Exchange(Post(path, encoded(sent)), answer, error_of_ollama)

    def _context(self, model: str) -> int:
        """The `num_ctx` that `model` is asked for."""
        known = self._contexts.get(model) or self._contexts.get(model + _LATEST)
        return known or self._options.num_ctx or USUAL_NUM_CTX

    def _context_of(self, shown: _Shown, loaded: int | None) -> int:
        """The requested context, at most the model's training context, which is the most that Ollama loads."""
        wanted = self._options.num_ctx or loaded or shown.num_ctx or USUAL_NUM_CTX
        return min(wanted, shown.trained or wanted)

    async def _check_version(self) -> None:
        reply = decoded(await self.client.get("/api/version"), self.name, "its version")
        try:
            version = str(reply["version"])
        except (KeyError, TypeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its version") from error
        numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
        # builds from source call themselves 0.0.0
        if (0, 0, 0) < numbers < FIRST_VERSION:
            raise BackendFailed(
                f"{self.name} is Ollama {version}, which silently truncates long prompts",
                hint="update it to 0.12.4 or later",
            )
        self._is_new_enough = True

    async def _digests(self) -> dict[str, str]:
        """Its models by name, each with its digest; the pool's own ones if the pool names any."""
        reply = decoded(await self.client.get("/api/tags"), self.name, "its models")
        try:
            digests = {str(model["name"]): str(model.get("digest")) for model in reply["models"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its models") from error
        wanted = self._options.served or frozenset(self._options.models.values())
        return {
            name: digest
            for name, digest in digests.items()
            if not wanted or name in wanted or name.removesuffix(_LATEST) in wanted
        }

    async def _loaded(self) -> dict[str, int | None]:
        """The models in memory, each with the context that it runs with."""
        reply = decoded(await self.client.get("/api/ps"), self.name, "what is loaded")
        try:
            return {str(model["name"]): model.get("context_length") for model in reply["models"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise BackendFailed(f"invalid list of loaded models from {self.name}") from error

    async def _show(self, name: str, digest: str) -> _Shown:
        page = await self.client.ask(Post("/api/show", encoded({"model": name})))
        if page.status == 404:
            # removed a moment ago
            return _Shown(digest, completes=False)
        return shown_of(decoded(page, self.name, f"'{name}'"), digest)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The reply of `/api/show` for a model; None for missing values."""

    digest: str
    num_ctx: int | None = None
    trained: int | None = None
    completes: bool = True


def shown_of(reply: Mapping[str, Any], digest: str) -> _Shown:
    """`num_ctx` of the Modelfile, the length that the model was trained on, and whether it completes at all."""
    try:
        info = reply.get("model_info") or {}
        trained = info.get(f"{info.get('general.architecture')}.context_length")
        found = _NUM_CTX.search(reply.get("parameters") or "")
        capabilities = reply.get("capabilities")
    except (TypeError, AttributeError) as error:
        raise BackendFailed("Ollama's description of a model is nonsense") from error
    return _Shown(
        digest,
        num_ctx=int(found[1]) if found else None,
        trained=trained if isinstance(trained, int) else None,
        completes=capabilities is None or "completion" in capabilities,
    )


def _duration(text: str) -> int | str:
    """Ollama reads a text as a duration with a unit, and a number as seconds."""
    return int(text) if _NUMBER.fullmatch(text) else text

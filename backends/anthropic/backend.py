"""Anthropic's messages API as a backend.

Clients of its own dialect reach it with the body that they sent, others with a translation of theirs.

Source: Anthropic API reference, "Messages", "Models", "Versions".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from backends.anthropic.prompt import messages_body
from backends.http.backend import HttpBackend, native_post
from backends.http.exchange import Exchange, HttpOptions, Post, decoded, encoded
from backends.messages.answer import MESSAGES_PATH, AnthropicAnswer, error_of_anthropic
from backends.messages.passed import PassedMessage, PassedWholeMessage
from policies.errors import BackendFailed
from policies.nouns import Capability, Prompt, Request


@dataclass(frozen=True, slots=True)
class AnthropicOptions(HttpOptions):
    """How to talk to Anthropic.

    `version` is sent as `anthropic-version` for clients of other dialects; 2026-10-21 takes no `temperature`,
    `top_p` or `top_k`. Models are asked for every `asks_every_s` at most.
    """

    version: str = "2023-06-01"
    asks_every_s: float = 30.0


class Anthropic(HttpBackend):
    """Anthropic's API at `url` (https://api.anthropic.com)."""

    kind = "anthropic"
    options_type = AnthropicOptions
    capabilities = frozenset({Capability.STRUCTURED_OUTPUT, Capability.MEDIA, Capability.MESSAGES})
    _options: AnthropicOptions

    def __init__(
        self,
        name: str,
        url: str,
        *,
        pool: str,
        options: HttpOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        chosen = options or self.options_type()
        assert isinstance(chosen, AnthropicOptions)
        chosen = replace(chosen, headers={**chosen.headers, "anthropic-version": chosen.version})
        super().__init__(name, url, pool=pool, options=chosen, clock=clock)
        self._asked_at: float | None = None

    @staticmethod
    def _key_headers(key: str) -> dict[str, str]:
        return {"x-api-key": key}

    async def probe(self) -> None:
        """Ask for the models, if that is long ago; raises BackendFailed if they do not come."""
        now = self._clock()
        if self._asked_at is not None and now - self._asked_at < self._options.asks_every_s:
            return
        self._asked_at = None
        page = decoded(await self.client.get("/v1/models?limit=1000"), self.name, "its models")
        try:
            names = frozenset(str(model["id"]) for model in page["data"])
        except (KeyError, TypeError) as error:
            raise BackendFailed(f"{self.name} answered nonsense when asked for its models") from error
        self._served = self._options.served or names
        self._asked_at = now

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """A message, streamed unless one of Anthropic's own clients asks for a whole one.

        Raises InvalidRequest for fields without a counterpart in the API.
        """
        model, native = self._backends_name(request), prompt.native
        if native is None or native.path != MESSAGES_PATH:
            post = Post("/v1/messages", encoded(messages_body(request, prompt, model)))
            return Exchange(post, AnthropicAnswer(self.name), error_of_anthropic)
        shown = None if native.body["model"] == model else native.body["model"]
        passed = PassedMessage if native.body.get("stream") else PassedWholeMessage
        post = native_post(native, {"model": model}, is_streamed=bool(native.body.get("stream")))
        return Exchange(post, passed(self.name, shown_model=shown), error_of_anthropic)

    @property
    def _may_answer_whole(self) -> bool:
        return True

"""OpenAI's own API.

Unsupported fields are refused by name, or dropped if a client of another dialect meant them as hints.

Source: OpenAI API reference, "Authentication", "Chat", "Completions", "Embeddings".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from backends.http.exchange import Exchange, HttpOptions
from backends.http.unsupported import refuse_unsupported
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from backends.openai.endpoints import Endpoints
from policies.errors import InvalidRequest
from policies.nouns import BEYOND_OPENAI, Capability, Prompt, Request

CHAT_PATH = "/v1/chat/completions"

_KNOWS = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_logprobs", "logit_bias"),
    *("choices", "grammar"),
)
_OF_OPEN_MODELS = (
    *(*BEYOND_OPENAI, "ignore_eos", "stop_token_ids", "min_tokens"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)
"""Fields of servers of open models; OpenAI rejects bodies that have them, with any value."""
_HINTS = ("reasoning_content", "reasoning", "thinking_blocks", "cache_control")
"""Members of messages and their parts for other servers."""


@dataclass(frozen=True, slots=True)
class OpenAIAPIOptions(OpenAIOptions):
    """How to talk to OpenAI.

    `organization` and `project` name the payer there. Its models are asked for every `asks_every_s` at most: it is
    not ours to probe as often as a server of our own.
    """

    organization: str | None = None
    project: str | None = None
    asks_every_s: float = 30.0


class OpenAI(OpenAICompatible):
    """OpenAI's API at `url` (https://api.openai.com/v1)."""

    kind = "openai"
    capabilities = OpenAICompatible.capabilities - {Capability.RERANK}
    # the posted path depends on the client's body
    own_paths = frozenset()
    options_type = OpenAIAPIOptions
    _options: OpenAIAPIOptions

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
        assert isinstance(chosen, OpenAIAPIOptions)
        payers = {"openai-organization": chosen.organization, "openai-project": chosen.project}
        payer_headers = {header: value for header, value in payers.items() if value is not None}
        chosen = replace(chosen, headers={**chosen.headers, **payer_headers})
        super().__init__(name, url, pool=pool, options=chosen, clock=clock)
        self._asked_at: float | None = None

    async def probe(self) -> None:
        """Ask for the models, if that is long ago; raises BackendFailed if they do not come."""
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= self._options.asks_every_s:
            self._asked_at = None
            await self._look()
            self._asked_at = now

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's body, as far as OpenAI knows its words. Raises InvalidRequest where leaving out would not do."""
        return self._openai_exchange(request, prompt, openai_fields(request, prompt))

    async def _learn_endpoints(self) -> Endpoints:
        """Chats and texts alone: OpenAI's responses are stored there and refer to each other."""
        return {}

    async def _look(self) -> None:
        await self._learn_models()


def openai_fields(request: Request, prompt: Prompt) -> dict[str, Any]:
    """Fields that replace the client's for OpenAI's API; None removes one. Raises InvalidRequest."""
    refuse_unsupported(request.sampling, _KNOWS, "OpenAI's API")
    body = prompt.body or {}
    if body.get("continue_final_message"):
        hint = "end with a message of the user"
        raise InvalidRequest("OpenAI's API continues no message", hint=hint, param="messages")
    own: dict[str, Any] = dict.fromkeys(_OF_OPEN_MODELS)
    if prompt.path != CHAT_PATH or prompt.body is None:
        return own
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    # newer models refuse the older name
    own |= {"max_tokens": None, "max_completion_tokens": most}
    own["messages"] = [_message(message) for message in body.get("messages") or ()]
    tools = body.get("tools") or None
    own["tools"] = [_without(tool) for tool in tools] if isinstance(tools, list) else tools
    return own


def _message(message: Mapping[str, Any]) -> Any:
    plain, content = _without(message), message.get("content")
    if isinstance(content, list):
        plain["content"] = [_without(part) for part in content]
    return plain


def _without(message: Any) -> Any:
    """`message`, or whatever stands in its place, without hints for other servers."""
    if not isinstance(message, Mapping):
        return message
    return {name: value for name, value in message.items() if name not in _HINTS}

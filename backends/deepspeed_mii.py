"""DeepSpeed-MII's OpenAI server (`mii.entrypoints.openai_api_server`).

It supports few parameters, ignores all others, and always samples: ignored ones are refused here, and greedy is sent
as a `top_k` of 1. Without `max_tokens` it draws 128 tokens, so `max_tokens` is always sent. It reports no usage in
streams; tokens are estimated. It breaks off if a prompt is too long; with `context_tokens` such a prompt is refused
first.

Source: DeepSpeed-MII's main branch, mii/entrypoints/openai_api_server.py, mii/batching/ragged_batching.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.http.exchange import Exchange
from backends.http.unsupported import refuse_unsupported
from backends.openai.compatible import OpenAICompatible
from policies.errors import ContextExceeded, InvalidRequest, Overflow
from policies.nouns import Capability, Prompt, Request

_KNOWS = ("temperature", "top_p", "top_k", "min_new_tokens", "stop", "choices")
_SKIPPED = ("tools", "response_format")


class DeepSpeedMII(OpenAICompatible):
    """A server at `url`."""

    kind = "deepspeed_mii"
    # the posted path depends on the client's body
    own_paths = frozenset()
    # clients that ask for usage get the estimate
    _passes_on = False
    # only streams are known to stop
    _always_streams = True
    capabilities = frozenset({Capability.CHOICES})

    async def probe(self) -> None:
        """Learn the model; raises BackendFailed if it is ill."""
        await self._check_health()
        await self._learn_models()

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """The client's body in MII's spelling. Raises InvalidRequest for fields that MII would ignore."""
        most = self._options.context_tokens
        if most is not None and request.surely_tokens >= most:
            overflow = Overflow(request.surely_tokens, None, most, at_least=True)
            raise ContextExceeded.of(overflow, where=f" of '{request.model}'", hint="shorten the prompt")
        return self._openai_exchange(request, prompt, own_fields(request, prompt.body or {}))


def own_fields(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that replace the client's; None removes one. Raises InvalidRequest."""
    sampling = request.sampling
    refuse_unsupported(sampling, _KNOWS, "DeepSpeed-MII")
    for name in _SKIPPED:
        if body.get(name):
            raise InvalidRequest(f"DeepSpeed-MII does not know `{name}`", hint=f"leave `{name}` out", param=name)
    if len(sampling.stop) > 1:
        raise InvalidRequest("DeepSpeed-MII takes only one `stop`", hint="send the most likely one", param="stop")
    own: dict[str, Any] = {"max_tokens": request.max_new_tokens, "max_completion_tokens": None, "stream_options": None}
    if sampling.temperature == 0:
        own |= {"temperature": None, "top_k": 1}
    elif not sampling.top_k:
        own["top_k"] = None
    return own

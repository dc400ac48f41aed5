"""OpenAI's own API: as strict as it is about arguments that it does not know. Built from the OpenAI API reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import serve

KNOWN = {
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("user", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "verbosity"),
    *("metadata", "store", "service_tier", "safety_identifier", "echo", "best_of", "suffix"),
}
KNOWN_IN_MESSAGES = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "refusal"})


@dataclass(eq=False)
class OpenAIAPI(OpenAIServer):
    """OpenAI's chats, completions, embeddings and models, refusing what they do not know."""

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        unknown = [name for name in body if name not in KNOWN] if "input" not in body else []
        unknown += [name for message in body.get("messages", ()) for name in message if name not in KNOWN_IN_MESSAGES]
        if unknown:
            return self.error(400, f"Unrecognized request argument supplied: {unknown[0]}")
        if "messages" in body and "max_tokens" in body:
            return self.error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return super().refusal(body, prompt_tokens)


if __name__ == "__main__":
    serve(OpenAIAPI, 8000)

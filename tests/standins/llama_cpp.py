"""A llama-server, built from llama.cpp's tools/server/README.md as of 2026; `is_native` false: llama-cpp-python's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.native_generate import steps
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import event, serve, tokens_in


@dataclass(eq=False)
class LlamaCppServer(OpenAIServer):
    """llama.cpp: OpenAI's API, /completion, /slots, /props, /health, /metrics."""

    slots: int = 4
    waiting: int = 0
    has_metrics: bool = True
    is_native: bool = True
    is_loading: bool = False

    def routes(self) -> Iterable[web.RouteDef]:
        native = (
            web.post("/completion", self.completion),
            web.get("/slots", self.tell_slots),
            web.get("/props", self.props),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        )
        return (*super().routes(), *(native if self.is_native else ()))

    async def health(self, request: web.Request) -> web.Response:
        if self.is_loading or self.is_ill:
            return self.error(503, "Loading model")
        return web.json_response({"status": "ok"})

    async def props(self, request: web.Request) -> web.Response:
        settings = {"params": {"temperature": 0.8}, "n_ctx": self.context_tokens}
        about = {"total_slots": self.slots, "model_alias": self.model, "model_path": f"/models/{self.model}.gguf"}
        return web.json_response(
            {"default_generation_settings": settings, **about, "chat_template": "{{- bos_token }}"}
        )

    async def tell_slots(self, request: web.Request) -> web.Response:
        slots = [
            {"id": at, "n_ctx": self.context_tokens, "speculative": False, "is_processing": at < self.open_requests}
            for at in range(self.slots)
        ]
        return web.json_response(slots)

    async def metrics(self, request: web.Request) -> web.Response:
        if not self.has_metrics:
            return self.error(501, "This server does not support metrics endpoint.")
        return web.Response(
            text=f"""# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing {self.open_requests}
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred {self.waiting}
"""
        )

    def model_card(self) -> dict[str, Any]:
        meta = {"vocab_type": 2, "n_ctx": self.context_tokens, "n_ctx_train": 131072}
        return {"id": self.model, "object": "model", "created": 1, "owned_by": "llamacpp", "meta": meta}

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
        error = {"code": status, "message": message, "type": kinds.get(status, "unavailable_error")}
        return web.json_response({"error": error}, status=status, headers=headers)

    def too_long(self, tokens: int) -> web.Response:
        message = f"request ({tokens} tokens) exceeds the available context size ({self.context_tokens} tokens)"
        sizes = {"n_prompt_tokens": tokens, "n_ctx": self.context_tokens}
        error = {"code": 400, "message": f"{message}, try increasing it", "type": "exceed_context_size_error", **sizes}
        return web.json_response({"error": error}, status=400)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return self.error(401, "Invalid API Key")
        prompt = tokens_in(body["prompt"])
        if prompt > self.context_tokens:
            return self.too_long(prompt)
        reply = await self.begin(request)
        with self.generating():
            await self._complete(reply, body, prompt)
        return reply

    async def _complete(self, reply: web.StreamResponse, body: Mapping[str, Any], prompt: int) -> None:
        common = {"index": 0, "stop": False, "id_slot": -1, "tokens_evaluated": prompt}
        if body.get("return_progress"):
            for done in (self.cached_tokens, prompt):
                progress = {"total": prompt, "cache": self.cached_tokens, "processed": done, "time_ms": 0}
                own = {"content": "", "tokens": [0], "tokens_predicted": 0, "prompt_progress": progress}
                await self.write(reply, event(common | own))
        drawn, finish = 0, "stop"
        async for step in steps(self, body["n_predict"]):
            drawn, finish = len(step.ids), step.finish or finish
            own = {"content": step.text[-1], "tokens": step.ids[-1:], "tokens_predicted": drawn}
            await self.write(reply, event(common | own | self._probabilities(body, step.ids[-1])))
        last = {
            "content": "",
            "tokens": [],
            "stop": True,
            "model": self.model,
            "tokens_predicted": drawn,
            "generation_settings": {"n_predict": body["n_predict"]},
            "truncated": False,
            "stop_type": "limit" if finish == "length" else "eos",
            "stopping_word": "",
            "tokens_cached": prompt + drawn - 1,
            "timings": {"cache_n": self.cached_tokens, "prompt_n": prompt - self.cached_tokens, "predicted_n": drawn},
        }
        await self.write(reply, event(common | last))

    def _probabilities(self, body: Mapping[str, Any], token: int) -> dict[str, Any]:
        if not body.get("n_probs"):
            return {}
        entry = {"id": token, "token": chr(token), "bytes": list(chr(token).encode()), "logprob": -0.5}
        return {"completion_probabilities": [entry | {"top_logprobs": [entry] * body["n_probs"]}]}


if __name__ == "__main__":
    serve(LlamaCppServer, 8080)

"""A Text Generation Inference router, built from its docs/openapi.json and metrics reference as of 3.3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.standin import StandIn, event, serve, tokens_in


@dataclass(eq=False)
class TGIServer(StandIn):
    """TGI: /generate_stream, /v1/chat/completions, /info, /health, /metrics. Checks requests once it streams."""

    finish_reason: str = "eos_token"
    queue: int = 0

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.post("/generate_stream", self.generate),
            web.post("/v1/chat/completions", self.chat),
            web.get("/info", self.info),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        )

    async def info(self, request: web.Request) -> web.Response:
        limits = {"max_concurrent_requests": 128, "max_best_of": 2, "max_stop_sequences": 4, "max_input_tokens": 4095}
        about = {"model_id": self.model, "max_total_tokens": self.context_tokens, "version": "3.3.6"}
        return web.json_response({**about, **limits, "router": "text-generation-router"})

    async def health(self, request: web.Request) -> web.Response:
        if self.is_ill:
            return web.json_response({"error": "unhealthy", "error_type": "healthcheck"}, status=503)
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f"""# TYPE tgi_queue_size gauge
tgi_queue_size {self.queue}
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size {self.open_requests}
tgi_batch_current_max_tokens {self.open_requests * 500}
tgi_batch_max_total_tokens 16000
tgi_request_queue_duration_bucket{{le="0.1"}} 3
"""
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        parameters, prompt = body["parameters"], tokens_in(body["inputs"])
        reply = await self.begin(request)
        error = self._error(prompt, parameters.get("max_new_tokens") or 0)
        if error:
            await self.write(reply, event(error))
            return reply
        most, text = parameters.get("max_new_tokens"), ""
        with self.generating():
            async for piece in self.pieces(most):
                text += piece
                await self.write(reply, event(self._token(parameters, len(text), piece)))
            reason = "length" if self.finish(most) == "length" else self.finish_reason
            details = {
                "finish_reason": reason,
                "generated_tokens": len(text) + 1,
                "seed": parameters.get("seed"),
                "input_length": prompt,
            }
            last = self._token(parameters, len(text) + 1, "</s>", is_special=True)
            await self.write(reply, event(last | {"generated_text": text, "details": details}))
        return reply

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        most, prompt = body.get("max_tokens"), tokens_in(body["messages"])
        reply = await self.begin(request)
        error = self._error(prompt, most or 0)
        if error:
            await self.write(reply, event({"error": {"message": error["error"], "http_status_code": 422}}))
        else:
            with self.generating():
                await self._chat(reply, most, prompt)
        await self.write(reply, b"data: [DONE]\n\n")
        return reply

    async def _chat(self, reply: web.StreamResponse, most: int | None, prompt: int) -> None:
        drawn = 0
        async for piece in self.pieces(most):
            drawn += 1
            await self.write(reply, event(_chunk({"role": "assistant", "content": piece})))
        await self.write(reply, event(_chunk({"role": "assistant", "content": ""}, self.finish(most))))
        usage = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        await self.write(reply, event({"object": "chat.completion.chunk", "choices": [], "usage": usage}))

    def _token(self, parameters: Mapping[str, Any], index: int, text: str, is_special: bool = False) -> dict[str, Any]:
        token = {"id": 2 if is_special else ord(text), "text": text, "logprob": -0.5, "special": is_special}
        tops = [token] * (parameters.get("top_n_tokens") or 0)
        beside = {"top_tokens": tops} if tops else {}
        return {"index": index, "token": token, **beside, "generated_text": None, "details": None}

    def _error(self, prompt: int, most: int) -> dict[str, str] | None:
        if self.is_busy:
            return {"error": "Model is overloaded", "error_type": "overloaded"}
        if prompt + most > self.context_tokens:
            message = f"`inputs` tokens + `max_new_tokens` must be <= {self.context_tokens}."
            message += f" Given: {prompt} `inputs` tokens and {most} `max_new_tokens`"
            return {"error": f"Input validation error: {message}", "error_type": "validation"}
        return None


def _chunk(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {
        "object": "chat.completion.chunk",
        "id": "",
        "created": 1,
        "model": "tgi",
        "choices": [choice],
        "usage": None,
    }


if __name__ == "__main__":
    serve(TGIServer, 8080)

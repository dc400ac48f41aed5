"""An Ollama server, built from its docs/api.md as of 0.12.4 to 0.14. As Ollama does, it cuts what is too long."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.standins.standin import StandIn, serve, tokens_in

CREATED = "2026-01-01T00:00:00.000000Z"
EXPIRES = "2026-01-01T00:05:00.000000Z"


@dataclass(eq=False)
class OllamaServer(StandIn):
    """Ollama: /api/chat, /api/generate, /api/tags, /api/ps, /api/show, /api/version."""

    version: str = "0.14.0"
    modelfile_num_ctx: int | None = None
    capabilities: tuple[str, ...] = ("completion", "tools", "thinking")
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further models, each with its capabilities."""
    listed_only: tuple[str, ...] = ()
    """Models that were removed just after they were listed."""
    thinking: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    breaks_off: bool = False
    hides_cached: bool = False
    loaded: dict[str, int] = field(default_factory=dict)
    loads: int = 0

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.get("/", self.greet),
            web.get("/api/version", self.tell_version),
            web.get("/api/tags", self.tags),
            web.get("/api/ps", self.ps),
            web.post("/api/show", self.show),
            web.post("/api/chat", self.chat),
            web.post("/api/generate", self.generate),
        )

    async def greet(self, request: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def tell_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def tags(self, request: web.Request) -> web.Response:
        if self.is_ill:
            return self.error(500, "model list cache unavailable")
        return web.json_response({"models": [self._card(name) | {"modified_at": CREATED} for name in self.models()]})

    async def ps(self, request: web.Request) -> web.Response:
        running = [
            self._card(name) | {"expires_at": EXPIRES, "size_vram": 1000, "context_length": length}
            for name, length in self.loaded.items()
        ]
        return web.json_response({"models": running})

    async def show(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = self._full(body.get("model") or body.get("name"))
        if name not in self.models() or name in self.listed_only:
            return self.error(404, f"model '{name}' not found")
        parameters = 'stop                           "<|eot_id|>"'
        if self.modelfile_num_ctx:
            parameters = f"num_ctx                        {self.modelfile_num_ctx}\n{parameters}"
        info = {"general.architecture": "llama", "llama.context_length": self.context_tokens}
        shown = {"modelfile": "", "template": "{{ .Prompt }}", "details": self._details(), "modified_at": CREATED}
        return web.json_response(
            {**shown, "parameters": parameters, "model_info": info, "capabilities": list(self.models()[name])}
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        return await self._answer(request, body, tokens_in(body["messages"]), is_chat=True)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        return await self._answer(request, body, tokens_in(body["prompt"]), is_chat=False)

    def models(self) -> dict[str, tuple[str, ...]]:
        return {self._full(self.model): self.capabilities, **self.others}

    def error(self, status: int, message: str) -> web.Response:
        return web.json_response({"error": message}, status=status)

    async def _answer(
        self, request: web.Request, body: Mapping[str, Any], prompt: int, *, is_chat: bool
    ) -> web.StreamResponse:
        options, name = body.get("options") or {}, self._full(body["model"])
        if name not in self.models():
            return self.error(404, f"model '{body['model']}' not found")
        if self.is_busy:
            return self.error(503, "server busy, please try again.  maximum pending requests exceeded")
        num_ctx = self._load(name, options.get("num_ctx"))
        if prompt > num_ctx:
            if body.get("truncate") is False:
                message = f"request ({prompt} tokens) exceeds the available context size ({num_ctx} tokens)"
                return self.error(400, json.dumps({"error": {"code": 400, "message": message}}))
            prompt = num_ctx
        with self.generating():
            if body.get("stream") is False:
                return await self._whole(body, prompt, is_chat=is_chat)
            return await self._stream(request, body, prompt, is_chat=is_chat)

    def _load(self, name: str, num_ctx: int | None) -> int:
        """The context that the model runs with; one that differs has it loaded anew."""
        wanted = num_ctx or self.modelfile_num_ctx or 4096
        wanted = min(wanted, self.context_tokens)
        if self.loaded.get(name) != wanted:
            self.loaded[name] = wanted
            self.loads += 1
        return wanted

    async def _stream(
        self, request: web.Request, body: Mapping[str, Any], prompt: int, *, is_chat: bool
    ) -> web.StreamResponse:
        reply, drawn = await self.begin(request, "application/x-ndjson"), 0
        most = (body.get("options") or {}).get("num_predict")
        if self.thinking:
            await self._line(reply, self._line_of(body, "", is_chat, thinking=self.thinking))
        async for piece in self.pieces(most):
            drawn += 1
            await self._line(reply, self._line_of(body, piece, is_chat))
        if self.breaks_off:
            await self._line(reply, {"error": "an error was encountered while running the model: CUDA error"})
            return reply
        for name, arguments in self.calls:
            call = {"id": f"call_{name}", "function": {"index": 0, "name": name, "arguments": arguments}}
            await self._line(reply, self._line_of(body, "", is_chat, tool_calls=[call]))
        await self._line(reply, self._last(self._line_of(body, "", is_chat), prompt, drawn, self.finish(most)))
        return reply

    async def _whole(self, body: Mapping[str, Any], prompt: int, *, is_chat: bool) -> web.Response:
        most = (body.get("options") or {}).get("num_predict")
        text = "".join([piece async for piece in self.pieces(most)])
        return web.json_response(self._last(self._line_of(body, text, is_chat), prompt, len(text), self.finish(most)))

    async def _line(self, reply: web.StreamResponse, content: object) -> None:
        await self.write(reply, json.dumps(content, ensure_ascii=False).encode() + b"\n")

    def _line_of(self, body: Mapping[str, Any], text: str, is_chat: bool, **beside: Any) -> dict[str, Any]:
        line: dict[str, Any] = {"model": body["model"], "created_at": CREATED}
        if is_chat:
            line["message"] = {"role": "assistant", "content": text, **beside}
        else:
            line |= {"response": text, **beside}
        if body.get("logprobs") and text:
            token = {"token": text, "logprob": -0.5, "bytes": list(text.encode())}
            line["logprobs"] = [token | {"top_logprobs": [token] * body["top_logprobs"]}]
        return line | {"done": False}

    def _last(self, line: Mapping[str, Any], prompt: int, drawn: int, finish: str) -> dict[str, Any]:
        counts = {"total_duration": 9, "load_duration": 1, "prompt_eval_duration": 3, "eval_duration": 5}
        counted = prompt - self.cached_tokens if self.hides_cached else prompt
        counts |= {"prompt_eval_count": counted} if counted else {}
        return {**line, "done": True, "done_reason": finish, "eval_count": drawn, **counts}

    def _card(self, name: str) -> dict[str, Any]:
        return {"name": name, "model": name, "size": 1000, "digest": f"digest of {name}", "details": self._details()}

    def _details(self) -> dict[str, Any]:
        about = {"parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"]}
        return {**about, "parameter_size": "8.0B", "quantization_level": "Q4_0"}

    @staticmethod
    def _full(name: str) -> str:
        return name if ":" in name else f"{name}:latest"


if __name__ == "__main__":
    serve(OllamaServer, 11434)

"""A Triton server with TensorRT-LLM's ensemble, built from Triton's docs/protocol and the KServe v2 protocol.

Run by hand it serves HTTP, and gRPC on a free port, which it prints.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web

from backends.kserve import inference_pb2 as kserve
from backends.kserve import inference_pb2_grpc
from tests.standins.standin import StandIn, event, serve, tokens_in

ENSEMBLE = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "bad_words": "BYTES",
    "stop_words": "BYTES",
    "exclude_input_in_output": "BOOL",
    "top_k": "INT32",
    "top_p": "FP32",
    "temperature": "FP32",
    "repetition_penalty": "FP32",
    "seed": "UINT64",
    "return_num_input_tokens": "BOOL",
    "stream": "BOOL",
}
LLMAPI = {
    "text_input": "BYTES",
    "streaming": "BOOL",
    "sampling_param_max_tokens": "INT32",
    "sampling_param_temperature": "FP32",
    "sampling_param_top_p": "FP32",
    "sampling_param_stop": "BYTES",
    "sampling_param_exclude_input_from_output": "BOOL",
    "return_finish_reason": "BOOL",
    "stop": "BOOL",
}


@dataclass(eq=False)
class TritonStandIn(StandIn):
    """Triton: generate_stream, ModelStreamInfer, the model repository, metadata, and its metrics on the same port."""

    inputs: Mapping[str, str] = field(default_factory=lambda: ENSEMBLE)
    accumulates: bool = False
    fails_with: str | None = None
    stopped: list[str] = field(default_factory=list)
    waiting: int = 0
    has_metrics: bool = True
    is_batched: bool = True
    grpc_port: int = 0

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.get("/v2/health/ready", self.ready),
            web.post("/v2/repository/index", self.index),
            web.get("/v2/models/{model}", self.metadata),
            web.post("/v2/models/{model}/generate_stream", self.generate_stream),
            web.post("/v2/models/{model}/generate", self.generate),
            web.get("/metrics", self.metrics),
        )

    def app(self) -> web.Application:
        app = super().app()
        app.cleanup_ctx.append(self._serve_grpc)
        return app

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=400 if self.is_ill else 200)

    async def index(self, request: web.Request) -> web.Response:
        states = {self.model: "READY", "preprocessing": "READY", "broken": "UNAVAILABLE"}
        return web.json_response([{"name": name, "version": "1", "state": state} for name, state in states.items()])

    async def metadata(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name == "preprocessing":
            query = {"name": "QUERY", "datatype": "BYTES", "shape": [-1, 1]}
            return web.json_response({"name": name, "inputs": [query], "outputs": [{"name": "INPUT_ID"}]})
        row = [-1] if self.is_batched else []
        inputs = [{"name": name, "datatype": kind, "shape": [*row, 1]} for name, kind in self.inputs.items()]
        outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [*row, -1]}]
        return web.json_response({"name": name, "platform": "ensemble", "inputs": inputs, "outputs": outputs})

    async def metrics(self, request: web.Request) -> web.Response:
        if not self.has_metrics:
            return web.Response(status=404)
        pairs = {"waiting": self.waiting, "scheduled": self.open_requests, "max": 64}
        blocks = {"max": 100, "free": 90, "used": 10, "tokens_per": 64, "fraction": 0.1}
        lines = [f'nv_trt_llm_request_metrics{{request_type="{kind}",version="1"}} {n}' for kind, n in pairs.items()]
        kv = "nv_trt_llm_kv_cache_block_metrics"
        lines += [f'{kv}{{kv_cache_block_type="{kind}",version="1"}} {n}' for kind, n in blocks.items()]
        return web.Response(text="\n".join([*lines, ""]))

    async def generate(self, request: web.Request) -> web.Response:
        """Only what stops a generation is answered here."""
        body = await request.json()
        self.stopped.append(body["id"])
        return web.json_response({"model_name": self.model, "text_output": ""})

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        if request.match_info["model"] != self.model:
            message = f"Request for unknown model: '{request.match_info['model']}' is not found"
            return web.json_response({"error": message}, status=404)
        error = self._error(body["text_input"])
        if error:
            # the first response sets the status, and is an event all the same
            return web.Response(status=400, body=event({"error": error}), content_type="text/event-stream")
        reply = await self.begin(request)
        with self.generating():
            async for text in self._texts(self._most(body)):
                about = {"id": body.get("id"), "model_name": self.model, "model_version": "1"}
                await self.write(reply, event({**about, **self._outputs(body, text)}))
        return reply

    async def _texts(self, most: int) -> AsyncIterator[str]:
        whole = ""
        async for piece in self.pieces(most):
            if self.accumulates and len(piece.encode()) > 1:
                yield whole + "\ufffd"
            whole += piece
            yield whole if self.accumulates else piece

    def _most(self, inputs: Mapping[str, Any]) -> int:
        return int(inputs.get("max_tokens") or inputs["sampling_param_max_tokens"])

    def _error(self, text: str) -> str | None:
        tokens = tokens_in(text)
        if self.is_busy:
            return "Exceeds maximum queue size"
        if tokens > self.context_tokens:
            message = f"Prompt length ({tokens}) exceeds maximum input length ({self.context_tokens})."
            return f"Encountered an error in Executor::enqueueRequests: {message}"
        return self.fails_with

    def _outputs(self, inputs: Mapping[str, Any], text: str) -> dict[str, Any]:
        reply: dict[str, Any] = {"text_output": text}
        if inputs.get("return_num_input_tokens"):
            reply["num_input_tokens"] = tokens_in(inputs["text_input"])
        if inputs.get("return_finish_reason"):
            reply["finish_reason"] = "stop"
        return reply

    async def _serve_grpc(self, app: web.Application) -> AsyncIterator[None]:
        server = grpc.aio.server()
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(self), server)
        self.grpc_port = server.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        await server.start()
        print(f"gRPC on 127.0.0.1:{self.grpc_port}")
        yield
        await server.stop(None)


class _Service(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, standin: TritonStandIn) -> None:
        self.standin = standin
        self.requests: list[kserve.ModelInferRequest] = []

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[kserve.ModelInferRequest], context: Any
    ) -> AsyncIterator[kserve.ModelStreamInferResponse]:
        standin = self.standin
        async for request in requests:
            inputs = {tensor.name: _value(tensor) for tensor in request.inputs}
            unknown = inputs.keys() - standin.inputs.keys()
            error = f"unexpected inference input '{min(unknown)}'" if unknown else standin._error(inputs["text_input"])
            if error:
                yield kserve.ModelStreamInferResponse(error_message=error)
                continue
            with standin.generating():
                async for text in standin._texts(standin._most(inputs)):
                    yield self._response(request, standin._outputs(inputs, text))
                yield self._final(request)

    def _response(
        self, request: kserve.ModelInferRequest, outputs: Mapping[str, Any]
    ) -> kserve.ModelStreamInferResponse:
        response = kserve.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.parameters["triton_final_response"].bool_param = False
        for name, value in outputs.items():
            datatype, raw = ("INT32", struct.pack("<i", value)) if isinstance(value, int) else ("BYTES", _text(value))
            response.outputs.add(name=name, datatype=datatype, shape=[1, 1])
            response.raw_output_contents.append(raw)
        return kserve.ModelStreamInferResponse(infer_response=response)

    def _final(self, request: kserve.ModelInferRequest) -> kserve.ModelStreamInferResponse:
        assert request.parameters["triton_enable_empty_final_response"].bool_param
        response = kserve.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        response.parameters["triton_final_response"].bool_param = True
        return kserve.ModelStreamInferResponse(infer_response=response)


def _value(tensor: kserve.ModelInferRequest.InferInputTensor) -> Any:
    (_, values) = tensor.contents.ListFields()[0]
    plain = [value.decode() if isinstance(value, bytes) else value for value in values]
    return plain[0] if len(plain) == 1 and tensor.name not in ("stop_words", "bad_words") else plain


def _text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


if __name__ == "__main__":
    serve(TritonStandIn, 8000)

"""Every kind of backend with its stage: one line each, and one for each dialect of a kind that has several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.contracts.stages import (
    anthropic,
    azure,
    deepspeed_mii,
    fake,
    fastchat,
    fastchat_text,
    llama_cpp,
    llama_cpp_completion,
    lmdeploy,
    lmdeploy_generate,
    mlc,
    ollama,
    ollama_generate,
    openai,
    openai_compatible,
    sglang,
    sglang_generate,
    shard,
    tabby,
    tabby_token_ids,
    tensorrt_llm,
    tgi,
    tgi_generate_stream,
    triton_server,
    triton_server_grpc,
    vllm,
)

STAGES: Mapping[str, Any] = {
    "anthropic": anthropic,
    "azure": azure,
    "deepspeed_mii": deepspeed_mii,
    "fake": fake,
    "fastchat": fastchat,
    "fastchat text": fastchat_text,
    "llama_cpp": llama_cpp,
    "llama_cpp /completion": llama_cpp_completion,
    "lmdeploy": lmdeploy,
    "lmdeploy /generate": lmdeploy_generate,
    "ollama": ollama,
    "ollama /api/generate": ollama_generate,
    "mlc": mlc,
    "openai": openai,
    "openai_compatible": openai_compatible,
    "sglang": sglang,
    "sglang /generate": sglang_generate,
    "shard": shard,
    "tabby": tabby,
    "tabby token ids": tabby_token_ids,
    "tensorrt_llm": tensorrt_llm,
    "tgi": tgi,
    "tgi /generate_stream": tgi_generate_stream,
    "triton_server": triton_server,
    "triton_server gRPC": triton_server_grpc,
    "vllm": vllm,
}

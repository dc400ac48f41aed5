"""Every kind of backend with its stage: one line each, and one for each dialect of a kind that has several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.contracts.stages import (
    anthropic,
    azure,
    deepspeed_mii,
    fake,
    lmdeploy,
    lmdeploy_generate,
    mlc,
    openai,
    openai_compatible,
    sglang,
    sglang_generate,
    shard,
    tensorrt_llm,
    tgi,
    tgi_generate_stream,
    vllm,
)

STAGES: Mapping[str, Any] = {
    "anthropic": anthropic,
    "azure": azure,
    "deepspeed_mii": deepspeed_mii,
    "fake": fake,
    "lmdeploy": lmdeploy,
    "lmdeploy /generate": lmdeploy_generate,
    "mlc": mlc,
    "openai": openai,
    "openai_compatible": openai_compatible,
    "sglang": sglang,
    "sglang /generate": sglang_generate,
    "shard": shard,
    "tensorrt_llm": tensorrt_llm,
    "tgi": tgi,
    "tgi /generate_stream": tgi_generate_stream,
    "vllm": vllm,
}

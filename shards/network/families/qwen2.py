"""Qwen2 and Qwen2.5: a bias on queries, keys and values, and a window from some layer on."""

from __future__ import annotations

from dataclasses import replace

from shards.network.config import NetworkConfig
from shards.network.family import Family
from shards.network.fields import WindowFields


class Qwen2Fields(WindowFields, kw_only=True):
    """Qwen2's config.json."""


def _read(fields: Qwen2Fields, architecture: str) -> NetworkConfig:
    return replace(fields.network(architecture, fields.rope()), windows=fields.windows, qkv_bias=True)


FAMILY = Family(("Qwen2ForCausalLM",), ("qwen2",), Qwen2Fields, _read)

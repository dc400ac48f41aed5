"""All families that a shard serves."""

from __future__ import annotations

from shards.network.families import llama, mistral, qwen2, qwen3
from shards.network.family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)

ARCHITECTURES: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
"""By the name of the class in transformers, as config.json has it."""


def family_of(architecture: str) -> Family:
    """The family of an architecture in `ARCHITECTURES`."""
    return ARCHITECTURES[architecture]

"""All families that a shard serves."""

from __future__ import annotations

from shards.network.families import (
    deepseek,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from shards.network.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    mistral3.TEXT,
    mistral3.IMAGES,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma3.TEXT,
    gemma3.IMAGES,
    phi3.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    olmo2.FAMILY,
    gpt_oss.FAMILY,
    deepseek.V2,
    deepseek.V3,
)

ARCHITECTURES: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
"""By the name of the class in transformers, as config.json has it."""


MODEL_TYPES: dict[str, str] = {
    model_type: architecture
    for family in FAMILIES
    for model_type, architecture in zip(family.model_types, family.architectures, strict=True)
}
"""The architecture of each `model_type`, for a config.json that names none."""


def family_of(architecture: str) -> Family:
    """The family of an architecture in `ARCHITECTURES`."""
    return ARCHITECTURES[architecture]

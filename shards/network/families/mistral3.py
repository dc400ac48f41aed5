"""The text part of Mistral 3: Mistral Small 3.1 and later, and Ministral 3 with queries that grow by position."""

from __future__ import annotations

from shards.network.families.mistral import MistralFields, read
from shards.network.family import Family
from shards.network.fields import Count, Positive


class Ministral3Fields(MistralFields, kw_only=True):
    """Ministral 3's config.json."""

    head_dim: Count | None = 128
    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = None


TEXT = Family(("Ministral3ForCausalLM",), ("ministral3",), Ministral3Fields, read)

IMAGES = Family(
    ("Mistral3ForConditionalGeneration",),
    ("mistral3",),
    Ministral3Fields,
    read,
    is_nested=True,
    prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
"""The text part of the models that also take images."""

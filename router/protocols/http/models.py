"""The models that a client may use, in OpenAI's and in Anthropic's format.

Source: OpenAI API reference, "Models"; Anthropic API reference, "Models".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.fleet.cluster.served_model import ServedModel

MODELS_PATH = "/v1/models"

_NEVER = "1970-01-01T00:00:00Z"
"""Anthropic's value for an unknown release date."""


def model_entry(model: ServedModel) -> dict[str, Any]:
    """`model` as an entry of OpenAI's list."""
    entry: dict[str, Any] = {"id": model.name, "object": "model", "created": 0, "owned_by": "pointsman"}
    return entry | {"max_model_len": model.context_tokens, "backends": model.backends}


def anthropic_entry(model: ServedModel) -> dict[str, Any]:
    """`model` as an entry of Anthropic's list."""
    named = {"type": "model", "id": model.name, "display_name": model.name, "created_at": _NEVER}
    return named | {"max_input_tokens": model.context_tokens}


def model_list(models: Iterable[ServedModel], *, is_anthropic: bool) -> dict[str, Any]:
    """All of `models`, as one page."""
    if not is_anthropic:
        return {"object": "list", "data": [model_entry(model) for model in models]}
    entries = [anthropic_entry(model) for model in models]
    ends = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return {"data": entries, "has_more": False, "first_id": ends[0], "last_id": ends[1]}

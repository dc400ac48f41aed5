"""The JSON schema that a client wants an answer to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def schema_in(response_format: Mapping[str, Any]) -> Any:
    """The schema in a `response_format`, None if it has none.

    OpenAI has it at `json_schema.schema`. Beside `type` llama.cpp, Together and Fireworks have it as `schema`, and TGI
    as `value`, also where the type is `json_object`.
    """
    named = response_format.get("json_schema")
    places = (
        (named if isinstance(named, Mapping) else {}, "schema"),
        (response_format, "schema"),
        (response_format, "value"),
    )
    return next((place[name] for place, name in places if place.get(name) is not None), None)

"""Which kinds of JSON a schema allows."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.schema_kinds import ALL_KINDS, TEXT_ALONE, kinds_of

ROOT = {
    "$defs": {
        "unit": {"enum": ["C", "F"]},
        "loop": {"$ref": "#/$defs/loop"},
        "wide": {"anyOf": [{"$ref": "#/$defs/wide"}] * 50},
        "a/b": {"type": "integer"},
    }
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, TEXT_ALONE),
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"const": "a"}, {"const": 1}]}, {"string", "number"}),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, TEXT_ALONE),
        ({"enum": ["1", "2"]}, TEXT_ALONE),
        ({"enum": ["1", True, None, [1], {}]}, {"string", "boolean", "null", "array", "object"}),
        ({"$ref": "#/$defs/unit"}, TEXT_ALONE),
        ({"$ref": "#/$defs/a~1b"}, {"number"}),
        ({"$ref": "#/$defs/loop"}, ALL_KINDS),
        ({"anyOf": [{"$ref": "#/$defs/wide"}] * 50}, ALL_KINDS),
        ({"$ref": "#/nowhere"}, ALL_KINDS),
        ({"$ref": "https://example.com/a.json"}, ALL_KINDS),
        ({"type": "objekt"}, ALL_KINDS),
        ({}, ALL_KINDS),
        (True, ALL_KINDS),
    ],
)
def test_kinds(schema: Any, kinds: set[str]) -> None:
    assert kinds_of(schema, ROOT) == kinds

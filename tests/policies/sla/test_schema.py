"""The published JSON Schema: valid, fresh, and never stricter than the parser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import quantities
from policies.catalogue import builtin_catalogue
from policies.part import Part
from policies.shapes import Scalar
from policies.sla.parse import json_schema
from tests.policies.sla.examples import CATALOGUE, FILES, ROOT
from tests.policies.sla.mistakes import MUTATIONS, Mutation

SCHEMA = json_schema(CATALOGUE)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
SCALARS = {name: value for name, value in vars(quantities).items() if isinstance(value, Scalar)}


class Editor(yaml.SafeLoader):
    """Reads YAML 1.2 as editors do: of plain scalars only numbers, true, false and null are not text."""


Editor.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
):
    Editor.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
# in YAML 1.2 a leading zero does not make a number octal
Editor.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def as_editor(text: str) -> Any:
    """The file as an editor validates it: keys are text in JSON."""
    return json.loads(json.dumps(yaml.load(text, Editor)))


def complaints(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(as_editor(text))]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_published_schema_is_fresh() -> None:
    published = json.loads((ROOT / "docs/sla.schema.json").read_text())
    assert published == SCHEMA, "run `pointsman schema > docs/sla.schema.json`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_example_fits_the_schema_and_names_it(file: Path) -> None:
    text = file.read_text()
    assert complaints(text) == []
    sign, _, link = text.split("\n")[0].partition("$schema=")
    assert sign == "# yaml-language-server: "
    assert (file.parent / link).resolve() == ROOT / "docs/sla.schema.json"


@pytest.mark.parametrize("mutation", [mutation for mutation in MUTATIONS if mutation.structural], ids=str)
def test_a_mistake_of_structure_is_seen_by_an_editor(mutation: Mutation) -> None:
    assert complaints(mutation.text)


@pytest.mark.parametrize("text", ["", "tenants:\n", "classes: {15: }", "rules: ~", "on_miss: {standard: shed}"])
def test_what_the_parser_takes_for_empty_an_editor_does_too(text: str) -> None:
    assert complaints(text) == []


def numbers(unit: str) -> st.SearchStrategy[str]:
    whole = st.integers(0, 10**6).map(str) | st.integers(1, 999).map(lambda number: f"{number}_000")
    return st.builds(
        lambda number, part, space: f"{number}{part}{space}{unit}",
        whole,
        st.sampled_from(["", ".5"]),
        st.sampled_from(["", " "]),
    )


QUANTITIES = st.sampled_from(
    ["", "us", "ms", "s", "m", "h", "d", "k", "K", "M", "G", "B", "KiB", "MiB", "GiB", "kB", "MB", "GB", "%"]
).flatmap(numbers)
TEXTS = (
    QUANTITIES
    | st.builds(lambda sign, number: f"{sign} {number}", st.sampled_from(["<", "<=", ">", ">="]), QUANTITIES)
    | st.builds(lambda least, end: f"{least}..{end}", QUANTITIES, QUANTITIES)
    | st.sampled_from(["true", "FALSE", "429", " 12s ", "1.5", "10%", "0.1"])
    | st.text(max_size=8)
)


@pytest.mark.parametrize("name", SCALARS)
@given(text=TEXTS, quoted=st.booleans())
@settings(max_examples=150, deadline=None)
def test_an_editor_takes_every_text_that_the_parser_takes(name: str, text: str, quoted: bool) -> None:
    try:
        SCALARS[name](text.strip())
    except ValueError:
        return
    # a sign in front has a meaning of its own in YAML, so such texts are always quoted
    value = as_editor(text) if text[0].isalnum() and text.isprintable() and not quoted else text
    assert jsonschema.Draft202012Validator(SCALARS[name].schema()).is_valid(value), (text, SCALARS[name].schema())


def test_every_key_says_what_it_means() -> None:
    def silent(schema: Any, path: str) -> list[str]:
        if not isinstance(schema, dict):
            return []
        found = [] if "description" in schema or not path.endswith("*") else [path]
        for name, inner in schema.get("properties", {}).items():
            found += [] if inner.get("description") else [f"{path}.{name}"]
            found += silent(inner, f"{path}.{name}")
        for word in ("items", "additionalProperties"):
            found += silent(schema.get(word), path)
        return found + [missing for branch in schema.get("anyOf", ()) for missing in silent(branch, path)]

    assert silent(SCHEMA, "") == []


def test_parts_of_other_distributions_are_in_the_schema_and_plain_readers_take_any_text() -> None:
    def nearest(*, to: float = 0.0) -> Any:
        """Its nearness."""

    catalogue = builtin_catalogue().with_parts(
        scores={"nearest": Part(nearest)}, filters={"far": Part(nearest, {"to": float})}
    )
    schema = json_schema(catalogue)
    policy = schema["properties"]["policies"]["additionalProperties"]["properties"]
    assert policy["score"]["properties"]["nearest"]["description"] == "Its nearness."
    assert jsonschema.Draft202012Validator(policy["filter"]).is_valid([{"far": {"to": 3}}, "far"])
    assert not jsonschema.Draft202012Validator(policy["filter"]).is_valid([{"far": {"at": 3}}])

"""The section `policies`: parts with options, whether they come with Pointsman or from elsewhere."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

from policies.catalogue import builtin_catalogue
from policies.compose import Filter, Score
from policies.errors import ConfigError
from policies.part import Part
from policies.quantities import read_tokens
from policies.sla.parse import json_schema, parse
from tests.policies.builders import a_backend, a_request


def nearest(*, rack: str, far: float = 0.0) -> Score:
    """The nearness of a backend."""
    if rack == "none":
        raise ValueError("there is no rack 'none'")
    return lambda _, candidates: [1.0 if backend.name.startswith(rack) else far for backend in candidates]


def shorter(*, than: int) -> Filter:
    """Short prompts."""
    return lambda request, _: request.prompt_tokens < than


CATALOGUE = builtin_catalogue().with_parts(
    scores={"nearest": Part(nearest, {"rack": str, "far": float})},
    filters={"shorter": Part(shorter, {"than": read_tokens})},
)
SCHEMA = jsonschema.Draft202012Validator(json_schema(CATALOGUE))
CANDIDATES = [a_backend("a-0"), a_backend("b-0")]


def file(policy: str) -> str:
    return f"policies: {{default: {policy}}}\npools: {{own: {{local: 2}}}}\n"


@pytest.mark.parametrize(
    ("score", "weight", "values"),
    [
        ("{nearest: {rack: a}}", 1.0, [1.0, 0.0]),
        ("{nearest: {rack: b, weight: 3}}", 3.0, [0.0, 1.0]),
        ("{nearest: {weight: 0.5, rack: a, far: 0.25}}", 0.5, [1.0, 0.25]),
    ],
)
def test_a_score_gets_its_weight_and_its_options(score: str, weight: float, values: list[float]) -> None:
    text = file(f"{{score: {score}}}")
    (weighted,) = parse(text, catalogue=CATALOGUE).policies["default"].scores
    assert (weighted.name, weighted.weight) == ("nearest", weight)
    assert weighted.score(a_request(), CANDIDATES) == values
    assert SCHEMA.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("score", "weight"), [("{balance: 2}", 2.0), ("{balance: {weight: 2}}", 2.0), ("{balance: {}}", 1.0)]
)
def test_a_score_without_options_is_written_either_way(score: str, weight: float) -> None:
    text = file(f"{{score: {score}}}")
    (weighted,) = parse(text).policies["default"].scores
    assert (weighted.name, weighted.weight) == ("balance", weight)
    assert SCHEMA.is_valid(yaml.safe_load(text))


def test_a_filter_gets_its_required_option() -> None:
    policy = parse(file("{filter: {shorter: {than: 2k}}}"), catalogue=CATALOGUE).policies["default"]
    ((name, passes),) = policy.filters
    assert name == "shorter"
    assert [passes(a_request(prompt_tokens=tokens), CANDIDATES[0]) for tokens in (1999, 2000)] == [True, False]


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        ("{score: {nearest: {rak: a}}}", "score.nearest.rak: there is no 'rak' here (did you mean 'rack'?)"),
        ("{score: {nearest: {rack: a, far: away}}}", "score.nearest.far: could not convert string to float: 'away'"),
        ("{score: {nearest: {rack: [a]}}}", "score.nearest.rack: must be text, not a list"),
        ("{score: {nearest: {rack: a, weight: 0}}}", "score.nearest.weight: must be above zero"),
        ("{score: {nearest: {far: 1}}}", "score.nearest: has no rack (add rack: "),
        ("{score: {nearest: 3}}", "score.nearest: needs options (write {rack: ...})"),
        ("{score: {nearest: {rack: none}}}", "score.nearest: there is no rack 'none'"),
        ("{score: {balance: {rack: a}}}", "score.balance.rack: there is no 'rack' here"),
        ("{filter: shorter}", "filter: needs a value (write {shorter: ...}, Short prompts.)"),
        ("{filter: {shorter: {}}}", "filter.shorter: has no than (add than: "),
    ],
)
def test_an_option_that_is_wrong_is_reported_where_it_stands_and_once(policy: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(file(policy), catalogue=CATALOGUE)
    (problem,) = refused.value.problems
    assert problem.startswith(f"sla.yaml:1: policies.default.{complaint}")


@pytest.mark.parametrize("policy", ["{score: {nearest: 3}}", "{score: {nearest: {far: 1}}}", "{filter: shorter}"])
def test_an_editor_sees_that_an_option_is_missing(policy: str) -> None:
    assert not SCHEMA.is_valid(yaml.safe_load(file(policy)))

"""Every refusal has a remedy, and says it once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.errors import BackendFailed, ExpectedError, InvalidRequest


def kinds(root: type[ExpectedError] = ExpectedError) -> Iterator[type[ExpectedError]]:
    """Every class of error of the package itself."""
    if root.__module__ == "policies.errors":
        yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


ROOT = Path(__file__).parents[2]
KINDS = sorted(set(kinds()), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_refusal_without_a_hint_has_the_usual_remedy_of_its_kind(kind: type[ExpectedError]) -> None:
    error = kind("something is wrong")
    assert error.public_hint == kind.usual_hint
    assert error.public_hint.strip()
    assert error.public_hint not in ("something is wrong", error.public_message)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not ExpectedError], ids=lambda kind: kind.__name__)
def test_every_code_has_a_remedy_of_its_own(kind: type[ExpectedError]) -> None:
    assert kind.usual_hint != ExpectedError.usual_hint


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_hint_of_its_own_goes_first_unless_its_text_is_hidden(kind: type[ExpectedError]) -> None:
    error = kind("something is wrong", hint="mend it")
    assert error.public_hint == ("mend it" if kind.masked_message is None else kind.usual_hint)


def test_a_hidden_text_hides_its_hint() -> None:
    assert InvalidRequest("10.0.0.1 said no", hint="ask 10.0.0.1", public_message="no").public_hint == (
        InvalidRequest.usual_hint
    )


def test_the_sentence_ends_with_a_hint_that_is_about_this_request() -> None:
    assert str(InvalidRequest("no", hint="mend it")) == "no (mend it)"
    # the usual remedy is no part of it
    assert str(InvalidRequest("no")) == "no"


def test_the_remedy_of_a_hidden_text_is_in_it() -> None:
    assert BackendFailed.masked_message is not None
    assert BackendFailed.usual_hint in BackendFailed.masked_message


def written_with_hints() -> Iterator[tuple[str, str, str]]:
    """Every place in the code that raises or makes one of these errors: where, its sentence, its hint, as source."""
    names = {kind.__name__ for kind in KINDS}
    for package in ("backends", "policies", "router", "simulation"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names):
                    continue
                hints = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
                if hints and node.args:
                    where = f"{file.relative_to(ROOT)}:{node.lineno}"
                    yield where, ast.unparse(node.args[0]), ast.unparse(hints[0])


def words_of(source: str) -> str:
    """The text of a literal without its quotes, in lower case."""
    return source.removeprefix("f").strip("'\"").lower()


def test_no_hint_in_the_code_is_empty_or_repeats_its_sentence() -> None:
    places = list(written_with_hints())
    assert len(places) > 100
    repeated = [
        f"{where}: {hint}"
        for where, sentence, hint in places
        if words_of(hint) == "" or words_of(hint) in words_of(sentence) or words_of(sentence) in words_of(hint)
    ]
    assert repeated == []

"""Sound examples with one mistake in them: each is refused in its line, and the complaint says what to do."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.sla.parse import examine
from tests.policies.sla.examples import CATALOGUE, outside_of
from tests.policies.sla.mistakes import MUTATIONS, Mutation


def complaints(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        examine(text, source="sla.yaml", outside=outside_of(text), catalogue=CATALOGUE)
    return caught.value.problems


FAR = {"match no rule": 10, "has no keys": 3, "not YAML": 2}
"""A missing value is reported where its section or its owner begins, or where YAML gives up."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mistake_is_refused_in_its_line_with_a_hint(mutation: Mutation) -> None:
    found = [problem for problem in complaints(mutation.text) if mutation.says in problem]
    assert found, complaints(mutation.text)
    lines = [int(problem.split(":")[1]) for problem in found if problem.startswith("sla.yaml:")]
    assert min(abs(line - mutation.line) for line in lines) <= FAR.get(mutation.says, 1)


def test_there_are_enough_of_them_of_every_kind() -> None:
    assert len(MUTATIONS) >= 50
    assert len({str(mutation) for mutation in MUTATIONS}) == len(MUTATIONS)

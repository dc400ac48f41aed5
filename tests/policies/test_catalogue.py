"""The catalogue: a part's options are the arguments of its constructor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from policies.catalogue import builtin_catalogue
from policies.compose import Score
from policies.part import Part
from policies.quantities import read_count


def nearest(*, rack: str, far: float = 0.0) -> Score:
    """The nearness of a backend.

    More about it.
    """
    return lambda _, candidates: [1.0 if backend.name.startswith(rack) else far for backend in candidates]


def anything(**options: Any) -> Score:
    return lambda _, candidates: [float(len(options)) for _ in candidates]


def test_arguments_without_a_default_are_required() -> None:
    assert Part(nearest, {"rack": str, "far": float}).required == {"rack"}
    assert Part(anything, {"rack": str}).required == frozenset()


def test_a_part_is_summarised_by_the_first_line_of_its_docstring_or_its_name() -> None:
    assert Part(nearest, {"rack": str}).summary == "The nearness of a backend."
    assert Part(anything).summary == "anything"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rack": str, "row": str}, "takes no argument 'row'"),
        ({"far": float}, "requires 'rack', but this is none of its options"),
    ],
)
def test_options_that_do_not_fit_the_constructor_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Part(nearest, options)


def test_a_constructor_of_any_options_takes_any() -> None:
    assert Part(anything, {"row": str}).make(row="b")(None, [None]) == [1.0]  # type: ignore[arg-type,list-item]


def test_no_score_has_an_option_that_is_called_like_its_weight() -> None:
    def heavy(*, weight: int = 1) -> Score:
        return anything(weight=weight)

    with pytest.raises(ValueError, match="'heavy' has an option 'weight'"):
        builtin_catalogue().with_parts(scores={"heavy": Part(heavy, {"weight": read_count})})


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="'balance' is defined already"):
        builtin_catalogue().with_parts(scores={"balance": Part(anything)})

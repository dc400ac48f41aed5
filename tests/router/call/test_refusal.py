"""Which error a prompt gets that no backend takes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.catalogue import builtin_catalogue
from policies.errors import ContextExceeded, ExpectedError, NoBackend
from policies.nouns import BackendView, Capability
from router.call.refusal import refusal_of
from tests.policies.builders import a_backend, a_cluster, a_request

SMALL = a_backend("small", context_tokens=512)


def refused(*backends: BackendView, **request: Any) -> ExpectedError:
    asked, view = a_request(**{"prompt_tokens": 5000, **request}), a_cluster(*backends)
    decision = builtin_catalogue().policies["default"].decide(asked, view, random.Random(1))
    assert decision.chosen is None
    return refusal_of(asked, view, decision)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(a_backend("other", pool="other", models=frozenset({"qwen"})), id="serves another model"),
        pytest.param(a_backend("other", context_tokens=600), id="is too small as well"),
        pytest.param(a_backend("other", context_tokens=600, healthy=False), id="is too small and ill"),
        pytest.param(a_backend("other", models=frozenset()), id="was not reached, and is of a pool that was"),
    ],
)
def test_a_prompt_too_long_for_every_backend_of_its_model_is_the_clients_to_shorten(other: BackendView) -> None:
    for backends in ((SMALL, other), (other, SMALL)):
        error = refused(*backends)
        assert isinstance(error, ContextExceeded)
        assert error.retry_after_s is None
        assert error.overflow is not None
        assert error.overflow[:2] == (5000, 100)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(a_backend("other", context_tokens=8192, healthy=False), id="is long enough and ill"),
        pytest.param(a_backend("other", healthy=False), id="does not tell its context and is ill"),
        pytest.param(a_backend("other", pool="other", models=frozenset()), id="is of a pool that was never reached"),
    ],
)
def test_a_prompt_that_another_backend_may_take_later_is_not_too_long(other: BackendView) -> None:
    assert isinstance(refused(SMALL, other), NoBackend)


def test_pools_of_other_rules_do_not_matter() -> None:
    away = a_backend("other", pool="other", models=frozenset())
    assert isinstance(refused(SMALL, away, pools=("own",)), ContextExceeded)


def test_nor_does_a_long_context_that_lacks_what_is_needed() -> None:
    able = a_backend("able", context_tokens=512, capabilities=frozenset(Capability))
    unable = a_backend("unable", context_tokens=8192)
    assert isinstance(refused(able, unable, needs=frozenset({Capability.LOGPROBS})), ContextExceeded)


def test_the_error_for_an_estimated_length_has_the_lower_bound() -> None:
    error = refused(SMALL, least_prompt_tokens=1200)
    assert "at least 1200 input tokens" in error.message


@pytest.mark.parametrize(
    ("count", "more"), [(1, ""), (7, ""), (8, ""), (9, " and 1 more"), (10, " and 2 more"), (30, " and 22 more")]
)
def test_eight_backends_are_named_and_the_others_counted(count: int, more: str) -> None:
    error = refused(*(a_backend(f"own-{number}", healthy=False) for number in range(count)))
    assert isinstance(error, NoBackend)
    named = [f"own-{number}: " for number in range(count)]
    assert error.hint is not None
    assert [name in error.hint for name in named] == [True] * min(count, 8) + [False] * (count - 8)
    assert error.hint.endswith(more)
    assert (" more" in error.hint) is bool(more)

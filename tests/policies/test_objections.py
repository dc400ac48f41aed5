"""Objections of filters, in words."""

from __future__ import annotations

import pytest

from policies import waiting
from policies.catalogue import usual_filters
from policies.objections import in_words

ADDED_BY_PLUGINS = "by "
OF_VIEWS = {"incapable", "only_prefills", "no_endpoint", "other_dialect", "not_in_subset", "not_taken"}
"""Reasons in a view, which the router gives: see `BackendView.unfit`."""

ON_WAITING = {waiting.UNREACHED, waiting.ABSENT, waiting.AWAITS_BLOCKS, waiting.NEEDS_PREFILL, *waiting.PASSING}


@pytest.mark.parametrize("objection", sorted({name for name, _ in usual_filters()} | ON_WAITING | OF_VIEWS))
def test_every_objection_of_ours_has_words(objection: str) -> None:
    assert not in_words(objection).startswith(ADDED_BY_PLUGINS)
    assert "_" not in in_words(objection)


def test_the_filter_of_another_distribution_is_named() -> None:
    assert in_words("of_a_plugin") == "by of_a_plugin"

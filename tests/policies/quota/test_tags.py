"""A request has the tags that its tenant knows, from a header or its metadata."""

from __future__ import annotations

import pytest

from policies.nouns import Limits, Tenant
from policies.quota.tags import HEADER, MOST_TAGS, tags_of

TENANT = Tenant("a", "a", tag_limits={"nightly": Limits(requests_per_minute=1), "eval": Limits()})


@pytest.mark.parametrize(
    ("headers", "metadata", "tags"),
    [
        ({}, {}, ()),
        ({HEADER: "nightly"}, {}, ("nightly",)),
        ({HEADER: " nightly ,eval,, nightly"}, {}, ("eval", "nightly")),
        ({}, {"tags": "eval"}, ("eval",)),
        ({HEADER: "nightly"}, {"tags": "eval"}, ("nightly",)),
        ({HEADER: "unknown"}, {}, ()),
    ],
)
def test_tags_that_the_file_knows_count(headers: dict[str, str], metadata: dict[str, str], tags: object) -> None:
    assert tags_of(TENANT, headers, metadata) == tags


def test_a_tenant_without_tags_reads_none() -> None:
    assert tags_of(Tenant("b", "b"), {HEADER: "nightly"}, {}) == ()


def test_of_very_many_tags_some_count() -> None:
    names = [f"t{number}" for number in range(20)]
    tenant = Tenant("a", "a", tag_limits=dict.fromkeys(names, Limits()))
    assert len(tags_of(tenant, {HEADER: ",".join(names)}, {})) == MOST_TAGS

"""The tags that a client gives a request, such as the job that it is a part of."""

from __future__ import annotations

from collections.abc import Mapping

from policies.nouns import Tenant

HEADER = "x-pointsman-tags"

MOST_TAGS = 8
"""Tags of one request that count; further ones are left out."""


def tags_of(tenant: Tenant, headers: Mapping[str, str], metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The tags in the header, or else in `metadata` under `tags`, separated by commas: those that `tenant` has, sorted.

    Others count nowhere, so that clients cannot fill the store of quotas.
    """
    if not tenant.tag_limits:
        return ()
    text = headers.get(HEADER) or metadata.get("tags") or ""
    named = {name.strip() for name in text.split(",")}
    return tuple(sorted(named & tenant.tag_limits.keys())[:MOST_TAGS])

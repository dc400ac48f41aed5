"""Builders: each states only what matters to the test that calls it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from policies.keys import IssuedKey, hash_of
from policies.nouns import BackendView, ClusterView, Limits, Request
from policies.quota.budget import Charge, Descriptor, Reservation

REQUEST = Request(
    "r1", "acme", "llama", "acme", prompt_tokens=1000, max_new_tokens=100, service_class="standard", session=None
)
BACKEND = BackendView("a", pool="own", kind="shard", models=frozenset({"llama"}), reported_s_ago=0.1)


def a_request(**what: Any) -> Request:
    return replace(REQUEST, **what)


def a_backend(name: str = "a", **what: Any) -> BackendView:
    return replace(BACKEND, name=name, **what)


def a_cluster(*backends: BackendView) -> ClusterView:
    return ClusterView(backends, taken_at=0.0)


def a_descriptor(tenant: str = "acme", model: str | None = None, **limits: int) -> Descriptor:
    return Descriptor(tenant, Limits(**limits), model)


def a_reservation(name: str = "r1", *descriptors: Descriptor, **charge: int) -> Reservation:
    return Reservation(name, descriptors, Charge(**charge))


def an_issued_key(text: str = "pm_one", tenant: str = "acme", **what: Any) -> IssuedKey:
    return IssuedKey(hash_of(text), tenant, **{"created": 1_700_000_000, **what})

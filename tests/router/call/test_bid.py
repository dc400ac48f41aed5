"""A bid knows on which backends its prompt was tried, and whether it may be tried on another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from backends.fake import FakeBackend
from policies.errors import BackendFailed, ContextExceeded, ExpectedError, InvalidRequest, Overloaded, Unreached
from policies.nouns import ClusterView, Decision, Native, Prompt, ServiceClass
from router.call.bid import MOST_TRIES, Bid, Found, Placed
from router.call.blaming import suspect_of
from router.fleet.cluster.cluster import Cluster
from tests.policies.builders import a_backend, a_request

CONTEXTS = {"b0": 8000, "b1": 8000, "b2": 32_000, "b3": None}


def a_bid(deadline_s: float | None = None, **what: Any) -> Bid:
    def unused(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is decided here")

    return Bid(
        a_request(**what),
        prompt=Prompt(),
        service_class=ServiceClass("chat", 0, deadline_s=deadline_s),
        new_tokens=10,
        arrived_at=10.0,
        decide=unused,
        refusal=unused,
        sent=unused,
        ended=unused,
    )


def placed_at(name: str, bid: Bid) -> Placed:
    backends = {backend: a_backend(backend, context_tokens=tokens) for backend, tokens in CONTEXTS.items()}
    cluster = Cluster([FakeBackend(name)], clock=lambda: 0.0)
    found = Found(ClusterView(tuple(backends.values()), 0.0), Decision(name, "default"), is_free=True)
    return Placed(bid, found, backends[name], cluster.begin(name, bid.request, 1))


@pytest.mark.parametrize("failure", [BackendFailed("it broke"), Overloaded("it is busy"), Unreached("it is away")])
def test_after_a_failure_of_its_backend_another_one_is_tried(failure: ExpectedError) -> None:
    bid = a_bid()
    assert bid.may_retry(placed_at("b0", bid), failure, now=11.0)
    assert (bid.avoiding, bid.failed, bid.failed_at) == ({"b0"}, {"b0"}, 11.0)


def test_an_error_of_the_request_is_not_retried() -> None:
    bid = a_bid()
    assert not bid.may_retry(placed_at("b0", bid), InvalidRequest("no such field"), now=11.0)
    assert (bid.avoiding, bid.tries) == (frozenset(), 0)


def test_only_backends_that_had_it_count_as_tries() -> None:
    bid = a_bid()
    for _ in range(2 * MOST_TRIES):
        assert bid.may_retry(placed_at("b0", bid), Unreached("it is away"), now=11.0)
    answers = [bid.may_retry(placed_at("b1", bid), BackendFailed("it broke"), now=12.0) for _ in range(MOST_TRIES)]
    assert answers == [True] * (MOST_TRIES - 1) + [False]
    assert bid.failed_at == 11.0, "the first failure counts"


def test_backends_with_a_context_as_short_are_avoided_if_a_longer_one_is_left() -> None:
    bid = a_bid(least_prompt_tokens=7000, likely_prompt_tokens=(7000, 9000))
    assert bid.may_retry(placed_at("b0", bid), ContextExceeded("too long"), now=11.0)
    assert bid.avoiding == {"b0", "b1"}
    assert not bid.may_retry(placed_at("b2", bid), ContextExceeded("too long"), now=11.0)


def test_a_counted_prompt_that_is_too_long_is_tried_nowhere_else() -> None:
    bid = a_bid()
    assert not bid.may_retry(placed_at("b0", bid), ContextExceeded("too long"), now=11.0)


def test_backends_that_are_ill_by_now_are_allowed_again() -> None:
    bid = a_bid()
    for name in ("b0", "b1"):
        bid.may_retry(placed_at(name, bid), BackendFailed("it broke"), now=11.0)
    assert not bid.forgive(lambda _: False)
    assert bid.forgive(lambda name: name == "b1")
    assert (bid.avoiding, bid.failed) == ({"b0"}, {"b0", "b1"})


def test_a_backend_that_is_too_short_stays_avoided_however_ill_it_is() -> None:
    bid = a_bid(least_prompt_tokens=7000, likely_prompt_tokens=(7000, 9000))
    assert bid.may_retry(placed_at("b0", bid), ContextExceeded("too long"), now=11.0)
    assert not bid.forgive(lambda _: True)
    assert bid.avoiding == {"b0", "b1"}


def test_patience_in_an_outage_begins_with_the_outage_the_bid_or_its_first_failure() -> None:
    assert a_bid().patience_s(4.0, now=12.0, outage_s=5.0) == 3.0
    assert a_bid().patience_s(11.0, now=12.0, outage_s=5.0) == 4.0
    assert a_bid(deadline_s=60.0).patience_s(11.0, now=12.0, outage_s=5.0) == 58.0
    bid = a_bid()
    bid.may_retry(placed_at("b0", bid), BackendFailed("it broke"), now=10.5)
    assert bid.patience_s(11.9, now=12.0, outage_s=5.0) == 3.5


class Unread(dict[str, Any]):
    """A body that must not be written out."""

    def __repr__(self) -> str:
        raise AssertionError("a body of megabytes would hold up the event loop")


def test_a_request_is_recognized_by_its_bytes_without_looking_into_its_body() -> None:
    def digested(raw: bytes, body: Mapping[str, Any], **what: Any) -> bytes:
        prompt = Prompt(body=body, native=Native("/v1/chat/completions", body, raw))
        return suspect_of(replace(a_bid(**what), prompt=prompt)).digest

    first = digested(b'{"a": 1}', Unread(a=1))
    assert first == digested(b'{"a": 1}', Unread(a=1))
    assert len(first) == 16
    assert len({first, digested(b'{"a": 2}', Unread(a=2)), digested(b'{"a": 1}', Unread(a=1), model="other")}) == 3


def test_a_request_without_bytes_is_recognized_by_its_body_and_its_tokens() -> None:
    prompts = [Prompt(b"1234", {"a": 1}), Prompt(b"5678", {"a": 1}), Prompt(b"1234", {"a": "\ud800"})]
    digests = [suspect_of(replace(a_bid(), prompt=prompt)).digest for prompt in prompts]
    assert len(set(digests)) == 3
    assert digests[0] == suspect_of(replace(a_bid(), prompt=Prompt(b"1234", {"a": 1}))).digest

"""Losses of cached tokens: each for its cause, in order, and together the ideal minus the measured tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from router.operate.diagnose.hit_rate import HitReport, LostTokens, accounts_of, hit_report
from router.operate.diagnose.logged import LoggedRequest
from tests.router.operate.diagnose.scene import a_request, a_visit

CHUNK = 512
DOCUMENT = (1, 2, 3, 4)
SIZES = {"b0": 100_000, "b1": 100_000}


def lost(*requests: LoggedRequest, sizes: dict[str, int] | None = None) -> dict[str, int]:
    """The losses of the last request that are not 0."""
    account = list(accounts_of(requests, SIZES if sizes is None else sizes))[-1]
    return {cause: tokens for cause, tokens in account.lost._asdict().items() if tokens}


def asked(at_s: float, backend: str = "b0", cached: int = 0, **fields: Any) -> LoggedRequest:
    """A question about the document, which `backend` answers."""
    visit = {name: fields.pop(name) for name in ("held", "dropped", "is_whole") if name in fields}
    return a_request(at_s, keys=DOCUMENT, cached_tokens=cached, visits=(a_visit(at_s, backend, **visit),), **fields)


def test_nothing_is_lost_if_the_backend_had_what_it_computed() -> None:
    assert lost(asked(0), asked(10, cached=4 * CHUNK)) == {}


def test_the_first_request_of_a_prefix_loses_nothing() -> None:
    assert lost(asked(0)) == {}


def test_what_a_backend_had_computed_and_has_no_longer_it_evicted() -> None:
    assert lost(asked(0), asked(10, cached=CHUNK)) == {"engine_eviction": 3 * CHUNK}


def test_what_no_cache_of_the_total_size_can_keep_is_lost_by_capacity() -> None:
    others = [
        a_request(1.0 + number, keys=(100 + number,), visits=(a_visit(1.0 + number, "b0"),)) for number in range(8)
    ]
    assert lost(asked(0), *others, asked(10), sizes={"b0": 6 * CHUNK}) == {"capacity": 4 * CHUNK}


def test_what_only_another_domain_had_is_lost_by_cache_domains() -> None:
    shared = (11, 12, 13, 14)
    first = asked(0, shared_keys=shared)
    second = a_request(10, keys=(5, 6, 7, 8), shared_keys=shared, visits=(a_visit(10, "b0"),))
    assert lost(first, second) == {"cache_domains": 4 * CHUNK}


def test_what_another_backend_was_known_to_hold_is_lost_by_placement() -> None:
    assert lost(asked(0), asked(10, "b1", held={"b0": 4 * CHUNK})) == {"placement": 4 * CHUNK}


def test_what_another_backend_held_unknown_to_the_router_is_lost_by_index_errors() -> None:
    assert lost(asked(0), asked(10, "b1")) == {"index_errors": 4 * CHUNK}
    assert lost(asked(0), asked(10, "b1", held={"b0": CHUNK})) == {"placement": CHUNK, "index_errors": 3 * CHUNK}


def test_what_another_backend_had_evicted_to_the_routers_knowledge_is_lost_by_eviction() -> None:
    # the router knows well what b0 holds: it had believed all that was cached
    known = [asked(0), asked(5, cached=4 * CHUNK, held={"b0": 4 * CHUNK})]
    assert lost(*known, asked(10, "b1")) == {"engine_eviction": 4 * CHUNK}
    assert lost(*known, asked(10, "b1", held={"b0": CHUNK})) == {"placement": CHUNK, "engine_eviction": 3 * CHUNK}
    # of a backend that the log left out nothing is known
    assert lost(*known, asked(10, "b1", is_whole=False)) == {"index_errors": 4 * CHUNK}


def test_a_backend_that_was_believed_to_hold_a_prefix_and_did_not_is_an_index_error_too() -> None:
    believed = {"b0": 4 * CHUNK, "b1": 4 * CHUNK}
    assert lost(asked(0), asked(10, "b1", held=believed)) == {"index_errors": 4 * CHUNK}


def test_a_holder_that_a_filter_dropped_is_lost_by_placement_with_the_filter_as_reason() -> None:
    requests = [asked(0), asked(10, "b1", dropped={"b0": "has_room"})]
    assert lost(*requests) == {"placement": 4 * CHUNK}
    found = hit_report(requests, SIZES).hit_rate
    assert found is not None
    (example,) = next(loss for loss in found.losses if loss.cause == "placement").examples
    assert (example.backend, example.amount) == ("b1", 4 * CHUNK)
    assert "has_room dropped it" in example.note


def test_what_was_evicted_because_of_copies_elsewhere_is_lost_by_copies() -> None:
    sizes = {"b0": 4 * CHUNK + 250, "b1": 4 * CHUNK + 250}
    new = a_request(5, keys=(21, 22, 23, 24), visits=(a_visit(5, "b0"),))
    copy = a_request(6, keys=(21, 22, 23, 24), visits=(a_visit(6, "b1", held={"b0": 4 * CHUNK}),))
    assert lost(asked(0), new, copy, asked(10), sizes=sizes) == {"copies": 4 * CHUNK}


def test_a_prefix_that_is_still_being_computed_is_lost_by_overlap() -> None:
    first = a_request(0, keys=DOCUMENT, visits=(a_visit(0, "b0", first_s=20.0),))
    assert lost(first, asked(10)) == {"overlap": 4 * CHUNK}


def test_what_was_measured_beyond_the_keys_is_ideal_too() -> None:
    # from before the log, or finer than a key
    account = list(accounts_of([asked(0, cached=3 * CHUNK)], SIZES))[-1]
    assert (account.ideal, account.measured, account.lost) == (3 * CHUNK, 3 * CHUNK, LostTokens())


def test_the_last_block_of_a_prompt_is_computed_always() -> None:
    first, again = (
        a_request(at, keys=DOCUMENT, prompt_tokens=4 * CHUNK, cached_tokens=cached, visits=(a_visit(at, "b0"),))
        for at, cached in ((0, 0), (10, 4 * CHUNK - 64))
    )
    assert lost(first, again) == {}


def test_tries_that_failed_have_left_the_prompt_where_it_was_computed() -> None:
    failed = a_request(0, keys=DOCUMENT, cached_tokens=None, visits=(a_visit(0, "b1"),))
    assert lost(failed, asked(10, "b1")) == {"engine_eviction": 4 * CHUNK}


def test_a_backend_that_reports_no_cached_tokens_is_left_out() -> None:
    requests = [asked(float(at), "b1") for at in range(10)] + [asked(20.0), asked(30.0, cached=4 * CHUNK)]
    report = hit_report(requests, SIZES)
    assert dict(report.silent) == {"b1": 10}
    assert report.hit_rate is not None
    assert report.hit_rate.requests == 2
    assert hit_report(requests[:10], SIZES) == HitReport(None, {"b1": 10}, {})


def test_a_log_without_answers_has_no_hit_rate() -> None:
    assert hit_report([a_request(0, cached_tokens=None)], {}) == HitReport(None, {}, {})


BACKENDS = some.sampled_from(("b0", "b1", "b2"))
TOKENS = some.integers(0, 3000)


@given(
    rows=some.lists(
        some.tuples(
            some.lists(some.integers(1, 3), max_size=5),
            BACKENDS,
            TOKENS,
            some.dictionaries(BACKENDS, TOKENS),
            some.dictionaries(BACKENDS, some.just("healthy")),
            some.booleans(),
            some.integers(1, 4000),
        ),
        max_size=25,
    ),
    size=some.integers(1, 10_000),
)
def test_the_losses_are_never_negative_and_sum_up_to_ideal_minus_measured(
    rows: list[tuple[Any, ...]], size: int
) -> None:
    requests = [
        a_request(
            float(at),
            keys=tuple(hash((tenant, *path[: end + 1])) for end in range(len(path))),
            shared_keys=tuple(hash(tuple(path[: end + 1])) for end in range(len(path))),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            visits=(a_visit(float(at), backend, held=held, dropped=dropped, first_s=at + cached / 100),),
        )
        for at, (path, backend, cached, held, dropped, tenant, prompt_tokens) in enumerate(rows)
    ]
    for account in accounts_of(requests, {"b0": size, "b1": size}):
        assert min(account.lost) >= 0
        assert sum(account.lost) == account.ideal - account.measured
        assert account.ideal <= account.request.prompt_tokens
    found = hit_report(requests, {"b0": size, "b1": size}).hit_rate
    if found is not None:
        assert sum(loss.tokens for loss in found.losses) == found.ideal_tokens - found.measured_tokens
        points = sum(loss.points for loss in found.losses)
        assert points == pytest.approx(found.ideal - found.measured, abs=0.01)

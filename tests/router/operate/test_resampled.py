"""The latest requests, decided by another file: what differs, and what cannot be known."""

from __future__ import annotations

from msgspec.structs import replace

from policies.nouns import BackendView, Capability, ClusterView, Decision, Request
from policies.sla.config import Config
from policies.sla.parse import parse
from router.operate.dashboard.board import Row
from router.operate.resampled import MOST_SHOWN, resampled

POOLS = "pools: {own: {kind: fake, at: 'x:1', model: m}, far: {kind: fake, at: 'y:1', model: m}}\n"
CLASSES = "classes: {chat: {}, slow: {}}\ntenants: {acme: {anonymous: true}}\n"


def a_file(rules: str) -> Config:
    return parse(CLASSES + POOLS + f"rules: [{rules}]")


def a_backend(name: str, pool: str) -> BackendView:
    return BackendView(name, pool=pool, kind="fake", models=frozenset({"m"}), capabilities=frozenset(Capability))


VIEW = ClusterView((a_backend("own-0", "own"), a_backend("far-0", "far")), taken_at=0.0)


def a_row(number: int = 1, service_class: str = "chat", **more: object) -> Row:
    asked = Request(
        id=f"r{number}",
        tenant="acme",
        model="m",
        domain="acme",
        prompt_tokens=100,
        max_new_tokens=10,
        service_class=service_class,
        rank=0,
        **more,  # type: ignore[arg-type]
    )
    return Row(number, number, asked.id, "acme", service_class, 0.0, asked, Decision("own-0", "default"))


def test_a_file_that_decides_alike_differs_in_nothing() -> None:
    sample = resampled([a_row()], a_file("{class: chat}"), a_file("{class: chat}"), VIEW)
    assert (sample.compared, sample.differ, sample.unknown, sample.differences) == (1, 0, 0, ())


def test_class_pools_and_backend_are_compared_and_counted() -> None:
    rows = [a_row(number, pools=("own",)) for number in range(3)]
    sample = resampled(rows, a_file("{class: chat, pools: own}"), a_file("{class: slow, pools: far}"), VIEW)
    found = {(each.what, each.now, each.then): each.count for each in sample.differences}
    assert found == {("class", "chat", "slow"): 3, ("pools", "own", "far"): 3, ("backend", "own-0", "far-0"): 3}
    assert (sample.compared, sample.differ) == (3, 3)


def test_a_request_whose_rule_tests_what_is_not_kept_is_not_compared() -> None:
    running = a_file("{class: slow, when: {headers: {x-team: ads}}}, {class: chat}")
    sample = resampled([a_row(service_class="slow")], running, a_file("{class: chat}"), VIEW)
    assert (sample.compared, sample.unknown) == (0, 1)


def test_a_tenant_that_is_gone_is_not_compared_and_one_that_is_missing_then_is_a_difference() -> None:
    running, other = a_file("{class: chat}"), parse(CLASSES.replace("acme", "other") + POOLS)
    assert resampled([a_row()], other, running, VIEW).unknown == 1
    (only,) = resampled([a_row()], running, other, VIEW).differences
    assert (only.what, only.now, only.then) == ("tenant", "acme", "none")


def test_only_the_newest_row_of_a_request_and_the_most_frequent_differences_count() -> None:
    rows = [a_row(), replace(a_row(), number=2), Row(3, 3, "x", "acme", "chat", 0.0)]
    sample = resampled(rows, a_file("{class: chat}"), a_file("{class: slow}"), VIEW)
    assert (sample.compared, len(sample.differences)) == (1, 1)
    assert len(sample.differences) <= MOST_SHOWN

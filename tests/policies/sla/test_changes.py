from dataclasses import replace

import pytest

from policies.sla.changes import carried_over, fixed_changes
from policies.sla.parse import parse
from policies.sla.server import FIXED_SERVER

FILE = "pools:\n  own: {kind: fake, at: ['x:1'], model: m}\nserver: {http: '127.0.0.1:80'}\n"


def changes(text: str) -> tuple[str, ...]:
    return fixed_changes(parse(FILE), parse(text), text=text, source="f")


def test_a_file_that_leaves_pools_and_servers_alone_has_no_fixed_changes() -> None:
    assert changes(FILE + "classes: {a: {}, b: {}}\n") == ()


def test_each_change_of_a_server_is_reported_with_its_line() -> None:
    text = FILE.replace("http", "grpc") + "classes: {a: {}}\n"
    assert [line.split(" (")[0] for line in changes(text)] == [
        "f:3: server.http: cannot change while the router runs",
        "f:3: server.grpc: cannot change while the router runs",
    ]


@pytest.mark.parametrize(
    "pools",
    [
        "{own: {kind: vllm, at: ['http://y:1', 'http://x:1']}}",
        "{own: {kind: fake, at: ['x:2']}}",
        "{more: {kind: fake, at: [x:1]}}",
    ],
)
def test_pools_may_change(pools: str) -> None:
    assert changes(FILE.replace("{own: {kind: fake, at: ['x:1'], model: m}}", pools)) == ()


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("{}", "{more: {local: 1}}", "f:1: pools.more: is a new pool"),
        ("{more: {local: 1}}", "{}", "f:1: pools: the pool 'more' is gone"),
        ("{more: {local: 1}}", "{more: {local: 2}}", "f:1: pools.more.local: cannot change while the router runs"),
        ("{more: {local: 1}}", "{more: {kind: shard, at: ['y:1']}}", "f:1: pools.more.at: cannot change while"),
        ("{more: {kind: shard, at: ['y:1']}}", "{more: {local: 1}}", "f:1: pools.more.at: cannot change while"),
    ],
)
def test_pools_whose_shards_were_started_with_the_router_may_not(before: str, after: str, problem: str) -> None:
    always = "own: {kind: fake, at: ['x:1']}, "
    first, second = (f"pools: {text}".replace("{", "{" + always, 1) for text in (before, after))
    (line,) = fixed_changes(parse(first), parse(second), text=second, source="f")
    assert line.startswith(problem)
    assert line.endswith("(restart to change pools with local shards)")


def test_what_was_started_is_carried_over_and_the_rest_is_new() -> None:
    running = parse(FILE.replace("pools:", "pools:\n  near: {local: 2}"))
    started = replace(running.pools["near"], at=("127.0.0.1:7001", "127.0.0.1:7002"))
    running = replace(running, pools={**running.pools, "near": started})
    pools = "pools: {near: {local: 2}, far: {kind: fake, at: ['y:1']}}\n"
    text = "classes: {a: {}}\nserver: {http: 'h:1', drain: 1s}\n" + pools
    after = carried_over(running, parse(text))
    assert after.pools["near"] is started
    assert after.pools["far"].at == ("y:1",)
    assert list(after.pools) == ["near", "far"]
    assert (after.server.http, after.server.drain_s) == ("127.0.0.1:80", 1.0)
    assert list(after.classes) == ["a"]


@pytest.mark.parametrize("name", [*FIXED_SERVER, "picker"])
def test_whatever_is_built_into_the_running_servers_cannot_change(name: str) -> None:
    value = {"max_body": "1MiB", "decision_log": "/log", "keys_file": "/keys"}.get(name, "127.0.0.1:9")
    written = "{cert: a, key: b}" if name == "tls" else f"'{value}'"
    text = FILE if name == "http" else FILE.replace("server: {", f"server: {{{name}: {written}, ")
    text = text.replace("127.0.0.1:80", value) if name == "http" else text
    assert [line.split(":")[2] for line in changes(text)] == [f" server.{name}"]


def test_the_operators_keys_may_change_but_never_go_and_leave_the_port_open() -> None:
    first, second = (
        f"{FILE}".replace("server: {", f"server: {{admin_keys: ['sha256:{digit * 64}'], ") for digit in "ab"
    )
    assert fixed_changes(parse(first), parse(second), text=second, source="f") == ()
    assert fixed_changes(parse(FILE), parse(first), text=first, source="f") == ()
    (line,) = fixed_changes(parse(first), parse(FILE), text=FILE, source="f")
    assert line.startswith("f:3: server.admin_keys: cannot all be removed while the router runs")

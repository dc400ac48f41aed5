import pytest

from policies.sla.changes import FIXED_SERVER, carried_over, fixed_changes
from policies.sla.parse import parse

FILE = "pools:\n  own: {kind: fake, at: ['x:1'], model: m}\nserver: {http: '127.0.0.1:80'}\n"


def changes(text: str) -> tuple[str, ...]:
    return fixed_changes(parse(FILE), parse(text), text=text, source="f")


def test_a_file_that_leaves_pools_and_servers_alone_has_no_fixed_changes() -> None:
    assert changes(FILE + "classes: {a: {}, b: {}}\n") == ()


def test_each_change_of_a_pool_is_reported_with_its_line() -> None:
    text = FILE.replace("kind: fake", "kind: shard").replace("http", "grpc") + "classes: {a: {}}\n"
    assert [line.split(" (")[0] for line in changes(text)] == [
        "f:2: pools.own.kind: cannot change while the router runs",
        "f:3: server.http: cannot change while the router runs",
        "f:3: server.grpc: cannot change while the router runs",
    ]


def test_a_removed_default_pool_is_reported_where_pools_are() -> None:
    before, text = parse(""), "\npools: {mine: {kind: fake}}\n"
    lines = fixed_changes(before, parse(text), text=text, source="f")
    assert lines[0] == "f:2: pools: the pool 'own' is gone (restart to change pools)"


def test_what_was_started_is_carried_over_and_the_rest_is_new() -> None:
    running = parse(FILE)
    after = carried_over(running, parse("classes: {a: {}}\nserver: {http: ':0', drain: 1s}\n".replace(":0", "h:1")))
    assert after.pools == running.pools
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

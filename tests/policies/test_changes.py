from policies.changes import carried_over, fixed_changes
from policies.parse import parse

FILE = "pools:\n  own: {kind: fake, at: ['x:1'], model: m}\nserver: {http: '127.0.0.1:80'}\n"


def changes(text: str) -> tuple[str, ...]:
    return fixed_changes(parse(FILE), parse(text), text=text, source="f")


def test_a_file_that_leaves_pools_and_servers_alone_has_no_fixed_changes() -> None:
    assert changes(FILE + "classes: {a: {}, b: {}}\n") == ()


def test_each_change_of_a_pool_is_told_with_its_line() -> None:
    text = FILE.replace("kind: fake", "kind: shard").replace("http", "grpc") + "classes: {a: {}}\n"
    assert [line.split(" (")[0] for line in changes(text)] == [
        "f:2: pools.own.kind: cannot change while the router runs",
        "f:3: server.http: cannot change while the router runs",
        "f:3: server.grpc: cannot change while the router runs",
    ]


def test_a_default_pool_that_goes_is_told_where_pools_are() -> None:
    before, text = parse(""), "\npools: {mine: {kind: fake}}\n"
    lines = fixed_changes(before, parse(text), text=text, source="f")
    assert lines[0] == "f:2: pools: the pool 'own' is gone (restart to change pools)"


def test_what_was_started_is_carried_over_and_the_rest_is_new() -> None:
    running = parse(FILE)
    after = carried_over(running, parse("classes: {a: {}}\nserver: {http: ':0', drain: 1s}\n".replace(":0", "h:1")))
    assert after.pools == running.pools
    assert (after.server.http, after.server.drain_s) == ("127.0.0.1:80", 1.0)
    assert list(after.classes) == ["a"]

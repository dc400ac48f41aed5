"""Addresses of one server, of Sentinels and of a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from policies.sla.redis_address import RedisKind, read_address

HOSTS = some.sampled_from(["redis-0.redis", "10.0.0.1", "::1", "fe80::2", "a"])
PLACES = some.lists(some.tuples(HOSTS, some.integers(1, 65_535)), min_size=1, max_size=4, unique=True)


@given(hosts=PLACES, is_tls=some.booleans(), db=some.integers(0, 99))
def test_hosts_are_read_as_they_are_written(hosts: list[tuple[str, int]], is_tls: bool, db: int) -> None:
    written = ",".join(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name, port in hosts)
    scheme = "rediss" if is_tls else "redis"
    read = read_address(f"{scheme}+sentinel://u%40:p%3A%2F@{written}/main/{db}?sentinel_password=s")
    assert (read.kind, read.hosts, read.is_tls, read.db) == (RedisKind.SENTINEL, tuple(hosts), is_tls, db)
    assert (read.primary, read.username, read.password, read.sentinel) == ("main", "u@", "p:/", (None, "s"))
    cluster = read_address(f"{scheme}+cluster://{written}")
    assert (cluster.kind, cluster.hosts, cluster.password) == (RedisKind.CLUSTER, tuple(hosts), None)


def test_usual_ports_are_those_of_the_servers() -> None:
    assert read_address("redis+sentinel://a,b:1/main").hosts == (("a", 26379), ("b", 1))
    assert read_address("redis+cluster://a").hosts == (("a", 6379),)


def test_a_place_is_the_same_whichever_host_is_named_first_and_shows_no_password() -> None:
    one = read_address("redis+sentinel://me:secret@a,b/main?sentinel_password=secret")
    assert one.place == read_address("redis+sentinel://b,a/main/0").place
    assert one.place != read_address("redis+sentinel://b,a/other").place
    assert read_address("redis+cluster://a,b").place != read_address("redis://a").place
    assert read_address("redis://u:p@there").place == read_address("redis://there:6379/0").place
    assert "secret" not in repr(one)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://a", "must be an address like"),
        ("redis+other://a", "must be an address like"),
        ("redis://a,b", "must name one host"),
        ("redis://a:1,b:2", "must name one host"),
        ("redis+cluster://", "host:port,host:port"),
        ("redis+cluster://a,,b", "host:port,host:port"),
        ("redis+cluster://a:0", "port from 1 to 65535"),
        ("redis+cluster://a,a:6379", "each host once"),
        ("redis+cluster://a/1", "the database 0 alone"),
        ("redis+cluster://a?db=1", "must not have the option 'db'"),
        ("redis+sentinel://a", "the primary's name"),
        ("redis+sentinel://a/main/x", "the primary's name"),
        ("redis+sentinel://a/main?password=x", "known: sentinel_username, sentinel_password"),
    ],
)
def test_mistakes_are_named(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_address(url)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix", "redis+cluster", "redis+sentinel"])
@given(
    password=some.text("0123456789#?/:@[]%", min_size=4, max_size=20),
    host=some.sampled_from(["host", "[::1]", "[", "a,[::1]", "[::1]x"]),
)
def test_no_error_repeats_the_password(scheme: str, password: str, host: str) -> None:
    said = ""
    try:
        read_address(f"{scheme}://user:\u2100{password}@{host}/0")
    except ValueError as error:
        said = str(error)
    assert "\u2100" not in said
    assert password not in said.replace("user:password@host", "")

"""The section `store`: an address, never a password in the file."""

import pytest

from policies.errors import ConfigError
from policies.sla.parse import examine, parse
from policies.sla.secrets import Outside
from policies.sla.store import StoreSettings


def test_without_it_nothing_is_shared() -> None:
    assert parse("").store == StoreSettings(None, 1, strict=False)


def test_an_address_and_how_many_share_it_are_read() -> None:
    read = parse("store: {redis: 'redis://there:6379/0', replicas: 4, strict: true}").store
    assert read == StoreSettings("redis://there:6379/0", 4, strict=True)
    secret = parse("store: {redis: '${env:URL}'}", environment={"URL": "rediss://me:pw@there/0"}).store
    assert secret.redis == "rediss://me:pw@there/0"
    assert "pw" not in repr(secret)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://there", "rediss://[::1]:6379/", "unix:///run/redis.sock?db=2", "redis://a/15"),
        *("redis+sentinel://a:26379,b,c/main", "rediss+sentinel://a/main/3", "redis+cluster://a,b:7000,[::1]:7001"),
    ],
)
def test_addresses_as_redis_clients_take_them_are_read(url: str) -> None:
    assert parse(f"store: {{redis: '{url}', namespace: team-a}}").store == StoreSettings(url, namespace="team-a")


def test_quotas_may_be_counted_by_several_servers() -> None:
    text = "store: {redis: 'redis://there', quotas: ['redis://a', '${env:URL}']}"
    read = parse(text, environment={"URL": "redis://me:pw@b"}).store
    assert read.quotas == ("redis://a", "redis://me:pw@b")
    assert "pw" not in repr(read)
    assert parse("store: {redis: 'redis://there', quotas: 'redis://a'}").store.quotas == ("redis://a",)


def test_routers_may_be_divided_into_cells() -> None:
    assert parse("store: {redis: 'redis://there', cell: east-1, replicas: 16}").store.cell == "east-1"


def test_a_cell_without_the_number_of_all_routers_is_doubted() -> None:
    def doubts(text: str) -> tuple[str, ...]:
        return examine(text, source="sla.yaml", outside=Outside({})).doubts

    assert any("counts on replicas" in doubt for doubt in doubts("store: {redis: 'redis://there', cell: east}"))
    assert not any("replicas" in doubt for doubt in doubts("store: {redis: 'redis://there', cell: east, replicas: 9}"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{replicas: 2}", "has no redis"),
        ("{redis: there}", "must be an address like redis://host:6379/0, .*not 'there'"),
        ("{redis: 'redis://me:pw@there'}", "must not contain a password"),
        ("{redis: 'redis://there', replicas: 0}", "above zero"),
        ("{redis: 'redis://there:abc'}", "must have a port from 1 to 65535"),
        ("{redis: 'redis://there:99999'}", "must have a port from 1 to 65535"),
        ("{redis: 'redis://there:6379/production'}", "must end with the number of a database"),
        ("{redis: 'redis://there', namespace: 'a b'}", "namespace"),
        ("{redis: 'redis://there', quotas: ['redis://a', 'redis://a:6379']}", "names a server twice"),
        ("{redis: 'redis://there', quotas: [there]}", "must be an address"),
        ("{redis: 'redis://there', quotas: []}", "quotas"),
        ("{redis: 'rediss://there', quotas: ['redis://a'], tls: {ca: a.pem}}", "is for rediss:// addresses alone"),
        ("{redis: 'redis+sentinel://a?sentinel_password=x'}", "must not contain a password"),
        ("{redis: 'redis+sentinel://a,b'}", "must end with the primary's name at the Sentinels"),
        ("{redis: 'redis+cluster://a,b', tls: {ca: a.pem}}", "is for rediss:// addresses alone"),
        ("{redis: 'redis://there', cell: 'a b'}", "must be letters, digits"),
        ("{redis: '${env:URL}'}", "not 'the value that it refers to'"),
    ],
)
def test_mistakes_are_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(f"store: {text}", environment={"URL": "secret"})

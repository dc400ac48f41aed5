"""The contract of every store of issued keys."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from policies.errors import InvalidRequest, Unavailable
from policies.keys import KeyBook, keys_of, with_key, without_key
from router.shared.keys.base import KeyStore
from router.shared.keys.file import FileKeys
from router.shared.keys.redis import RedisKeys
from tests.policies.builders import an_issued_key
from tests.router.shared.store.parts import RedisServer, a_redis

NOW_S = 1_700_000_000.0

Opens = Callable[[], KeyStore]
"""Opens the same place once more, as another router would."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
async def another(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> AsyncIterator[Opens]:
    server.clean()
    opened: list[KeyStore] = []

    def one_more() -> KeyStore:
        is_file = request.param == "file"
        opened.append(FileKeys(str(tmp_path / "keys.jsonl")) if is_file else RedisKeys(server.url))
        return opened[-1]

    yield one_more
    for store in opened:
        await store.close()


@pytest.fixture
def store(another: Opens) -> KeyStore:
    return another()


def adding(text: str, tenant: str = "acme") -> Callable[[KeyBook], KeyBook]:
    return lambda book: with_key(book, an_issued_key(text, tenant), now=NOW_S)


async def test_a_new_store_is_empty_and_reports_it_once(store: KeyStore) -> None:
    assert await store.look() == {}
    assert await store.look() is None


async def test_what_was_changed_is_what_another_router_sees(store: KeyStore, another: Opens) -> None:
    other = another()
    await other.look()
    changed = await store.change(adding("one"))
    assert [key.tenant for key in changed.values()] == ["acme"]
    assert await other.look() == changed
    assert await other.look() is None
    await other.change(lambda book: without_key(book, "acme", an_issued_key("one").id))
    assert await store.look() == {}


async def test_all_of_a_key_is_kept_over_a_restart(store: KeyStore, another: Opens) -> None:
    key = an_issued_key("one", name='ci, "quoted" Ω', expires=1_800_000_000, replaced_by="0123456789ab")
    await store.change(lambda book: with_key(book, key, now=NOW_S))
    assert await another().look() == {key.sha256: key}


async def test_a_change_that_is_refused_changes_nothing(store: KeyStore, another: Opens) -> None:
    book = await store.change(adding("one"))
    with pytest.raises(InvalidRequest, match="has no issued key 'nonsense'"):
        await store.change(lambda book: without_key(book, "acme", "nonsense"))
    assert await another().look() == book


async def test_changes_of_several_routers_at_once_lose_nothing(another: Opens) -> None:
    routers = [another() for _ in range(4)]
    names = [f"key {number}" for number in range(12)]
    changes = zip(itertools.cycle(routers), names, strict=False)
    await asyncio.gather(*(router.change(adding(name)) for router, name in changes))
    book = await another().look()
    assert book is not None
    assert {key.sha256 for key in keys_of(book, "acme")} == {an_issued_key(name).sha256 for name in names}
    assert "keys" in repr(routers[0])


@pytest.mark.parametrize("asked", ["look", "change"])
async def test_an_unreachable_store_is_reported_with_a_hint(asked: str, tmp_path: Path, server: RedisServer) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = FileKeys(str(folder / "keys.jsonl"))
    await file.change(adding("one"))
    folder.rename(tmp_path / "elsewhere")
    stores: list[KeyStore] = [file, RedisKeys(f"{server.url}-nowhere")]
    for store in stores:
        with pytest.raises(Unavailable, match=r"\(keys that were read before stay valid"):
            await (store.look() if asked == "look" else store.change(adding("two")))
        await store.close()


async def test_a_file_behind_a_link_is_changed_where_it_lies(tmp_path: Path) -> None:
    link, volume = tmp_path / "keys.jsonl", tmp_path / "volume"
    volume.mkdir()
    link.symlink_to(volume / "book.jsonl")
    through, beside = FileKeys(str(link)), FileKeys(str(volume / "book.jsonl"))
    await asyncio.gather(*(store.change(adding(f"{at} {store!r}")) for at in range(8) for store in (through, beside)))
    assert link.is_symlink()
    assert len(await FileKeys(str(link)).look() or ()) == 16

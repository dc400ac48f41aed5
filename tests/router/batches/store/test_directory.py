"""The store in a folder, and what two routers that share it do to each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from router.batches.store.base import BatchStoreFailed
from router.batches.store.directory import DirectoryStore
from tests.router.batches.parts import files_in


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return a_store(tmp_path)


def a_store(folder: Path) -> DirectoryStore:
    store = DirectoryStore(folder / "above" / "store")
    store.open()
    return store


def put(store: DirectoryStore, key: str, data: bytes) -> None:
    draft = store.draft("acme")
    draft.write(data)
    draft.commit(key)


def test_a_lock_is_swept_by_taking_it_however_old_it_is(tmp_path: Path) -> None:
    one, other = a_store(tmp_path), a_store(tmp_path)
    held, left = one.claim("held"), one.claim("left")
    assert held is not None
    assert left is not None
    left.close()
    for path in files_in(tmp_path):
        os.utime(path, (0, 0))
    other.sweep()
    assert one.names("locks") == ["held"]
    assert (held.is_held, other.claim("held")) == (True, None)
    held.close()
    taken = other.claim("held")
    assert taken is not None
    taken.close()


def test_a_lock_whose_file_was_deleted_is_lost(store: DirectoryStore) -> None:
    claim = store.claim("job")
    assert claim is not None
    claim.renew()
    store.delete("locks/job")
    assert not claim.is_held
    with pytest.raises(BatchStoreFailed, match="was deleted"):
        claim.renew()
    claim.close()


def test_one_of_many_gets_the_lock_while_others_sweep(tmp_path: Path) -> None:
    stores, owners, most = [a_store(tmp_path) for _ in range(4)], list[int](), list[int]()
    inside = threading.Lock()

    def work(store: DirectoryStore) -> None:
        for _ in range(100):
            store.sweep()
            if (claim := store.claim("job")) is not None:
                with inside:
                    owners.append(1)
                    most.append(len(owners))
                store.sweep()
                with inside:
                    owners.pop()
                claim.close()

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most
    assert max(most) == 1


def test_a_draft_is_swept_if_its_router_does_not_run(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    draft, killed = store.draft("acme"), store.draft("acme")
    draft.write(b"written")
    killed.write(b"never finished")
    assert store.drafted("acme") == 21
    # the kernel closes the files of a process that ends
    killed._file.close()
    a_store(tmp_path).sweep()
    assert store.drafted("acme") == 7
    draft.commit("contents/a")
    assert store.local("contents/a").read_bytes() == b"written"
    assert store.drafted("acme") == 0


def test_a_content_with_two_keys_takes_its_bytes_once(store: DirectoryStore) -> None:
    put(store, "contents/acme/a", b"x" * 100)
    put(store, "contents/acme/b", b"x" * 10)
    store.link("contents/acme/a", "inputs/job")
    assert store.sizes("contents/acme", "inputs/job", "logs/job", "none") == 110
    store.delete("contents/acme/a")
    assert store.sizes("contents/acme", "inputs/job") == 110


def test_documents_are_changed_one_after_the_other(tmp_path: Path) -> None:
    stores = [a_store(tmp_path) for _ in range(3)]

    def add(store: DirectoryStore) -> None:
        for _ in range(20):
            store.change("jobs/acme/a", lambda found: b"%d" % (int(found or b"0") + 1))

    threads = [threading.Thread(target=add, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].read("jobs/acme/a") == b"60"
    stores[0].change("jobs/acme/a", lambda _: None)
    assert stores[0].read("jobs/acme/a") == b"60"


def test_all_of_it_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = a_store(tmp_path)
        store.write("jobs/acme/a", b"{}")
        put(store, "contents/acme/b", b"prompts")
        store.link("contents/acme/b", "inputs/b")
        log = store.log("logs/b")
        log.append(b"answers\n")
        log.close()
        claim, draft = store.claim("b"), store.draft("acme")
        store.change("jobs/acme/a", lambda _: b"{}")
        modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
        assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
        assert len(modes) > 15
        draft.discard()
        assert claim is not None
        claim.close()
    finally:
        os.umask(before)


def test_folders_that_an_earlier_version_left_open_are_closed(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "store"
    for name in ("jobs", "contents", "drafts"):
        (folder / name).mkdir(parents=True, mode=0o755)
    a_store(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o700}

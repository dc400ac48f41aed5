"""Batches in a bucket. The service is moto's server, over HTTP: the file takes some seconds to start it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.errors import ConfigError
from router.batches.store.base import BatchStoreFailed
from router.batches.store.copies import LocalCopies
from router.batches.store.s3 import S3BatchStore
from router.batches.store.s3_claims import LEASE_S
from tests.router.batches.parts import a_batch_router, a_line, begun, ended, files_in, lines_in, openai_client
from tests.router.parts import ScriptedBackend
from tests.standins.s3 import S3Service, an_s3_service

PREFIXES = itertools.count()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def service() -> Iterator[S3Service]:
    with an_s3_service() as service:
        yield service


@pytest.fixture
def place() -> str:
    return f"s3://batches/of/{next(PREFIXES)}"


def a_store(service: S3Service, place: str, folder: Path, clock: Clock | None = None) -> S3BatchStore:
    store = S3BatchStore(place, service.settings(str(folder / "scratch")), clock=clock or Clock())
    store.open()
    return store


@pytest.fixture
def store(service: S3Service, place: str, tmp_path: Path) -> S3BatchStore:
    return a_store(service, place, tmp_path)


def put(store: S3BatchStore, key: str, data: bytes) -> None:
    draft = store.draft("acme")
    draft.write(data)
    draft.commit(key)
    draft.discard()


def test_documents_are_written_listed_and_deleted(store: S3BatchStore) -> None:
    assert store.read("jobs/acme/2") is None
    for key in ("jobs/acme/2", "jobs/acme/1", "jobs/other/3"):
        store.write(key, key.encode())
    store.write("jobs/acme/2", b"changed")
    assert (store.read("jobs/acme/2"), store.names("jobs/acme")) == (b"changed", ["1", "2"])
    assert (store.names("jobs"), store.names("none"), store.sizes("jobs/acme")) == (["acme", "other"], [], 18)
    store.delete("jobs/acme/1")
    store.delete("jobs/acme/1")
    assert store.names("jobs/acme") == ["2"]


def test_a_content_is_there_once_it_is_committed_and_read_from_a_copy(store: S3BatchStore) -> None:
    whole = bytes(range(256)) * 30_000
    put(store, "contents/a", whole)
    store.link("contents/a", "inputs/a")
    store.delete("contents/a")
    assert store.local("inputs/a").read_bytes() == whole
    assert store.local("inputs/a") == store.local("inputs/a")
    dropped = store.draft("acme")
    dropped.write(b"x")
    assert (store.drafted("acme"), store.drafted("other")) == (1, 0)
    dropped.discard()
    assert (store.drafted("acme"), files_in(store.scratch())) == (0, [])
    for call in (lambda: store.local("contents/a"), lambda: store.link("contents/a", "b")):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_log_has_all_pieces_of_all_owners_until_it_is_deleted(store: S3BatchStore) -> None:
    first = store.log("logs/job")
    pieces = [json.dumps([number, "x" * 100_000]).encode() + b"\n" for number in range(9)]
    for piece in pieces[:6]:
        first.append(piece)
    second = store.log("logs/job")
    for piece in pieces[6:]:
        second.append(piece)
        first.append(piece)
    assert set(store.logged("logs/job")) == set(pieces)
    assert list(store.logged("logs/job"))[:6] == pieces[:6]
    store.delete("logs/job")
    assert list(store.logged("logs/job")) == []


def test_one_owner_has_a_job_until_it_lets_go_or_is_late(service: S3Service, place: str, tmp_path: Path) -> None:
    clock = Clock()
    one, other = (a_store(service, place, tmp_path / name, clock) for name in "ab")
    claim = one.claim("job")
    assert claim is not None
    assert other.claim("job") is None
    clock.now += LEASE_S - 1
    claim.renew()
    assert other.claim("job") is None
    clock.now += LEASE_S - 1
    assert other.claim("job") is None
    clock.now += 2
    taken = other.claim("job")
    assert taken is not None
    assert not claim.is_held
    with pytest.raises(BatchStoreFailed, match="another router"):
        claim.renew()
    claim.close()
    assert one.claim("job") is None
    taken.close()
    assert one.claim("job") is not None


def test_claims_that_no_router_renews_are_swept_whatever_the_time_is_there(
    service: S3Service, place: str, tmp_path: Path
) -> None:
    clock = Clock()
    one, other = (a_store(service, place, tmp_path / name, clock) for name in "ab")
    held, lost = one.claim("held"), one.claim("lost")
    assert held is not None
    assert lost is not None
    for _ in range(3):
        other.sweep()
        assert other.names("claims") == ["held", "lost"]
        clock.now += LEASE_S / 3
        held.renew()
    other.sweep()
    assert other.names("claims") == ["held"]
    held.renew()
    with pytest.raises(BatchStoreFailed):
        lost.renew()
    assert other.claim("lost") is not None


def test_a_renewal_of_which_the_answer_was_lost_is_no_loss_of_the_claim(
    service: S3Service, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = a_store(service, place, tmp_path, clock)
    claim = store.claim("job")
    assert claim is not None
    put = claim._put

    def unanswered(*given: Any) -> str | None:
        put(*given)
        raise BatchStoreFailed("it takes too long")

    monkeypatch.setattr(claim, "_put", unanswered)
    claim.renew()
    monkeypatch.setattr(claim, "_put", put)
    claim.renew()
    assert claim.is_held
    assert store.claim("job") is None


def test_a_bucket_that_is_missing_stops_the_start(service: S3Service, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such bucket"):
        a_store(service, "s3://no-bucket/a", tmp_path)


def test_without_obstore_a_bucket_stops_the_start_and_the_error_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "sla.yaml"
    file.write_text(
        '{pools: {own: {kind: openai_compatible, at: ["http://h"], model: m}}, batches: {store: "s3://batches/a"}, '
        # the usual ports are those of other tests
        'server: {http: "127.0.0.1:0", grpc: off}}'
    )
    without = "import sys; sys.modules['obstore.store'] = None; from router.start.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", without, "serve", str(file)], capture_output=True, text=True)
    assert found.returncode == 1
    assert "obstore is not installed (pip install 'pointsman[s3]')" in found.stderr
    assert "Traceback" not in found.stderr


def test_while_the_service_is_away_each_call_fails_and_afterwards_goes_on(place: str, tmp_path: Path) -> None:
    with an_s3_service() as own:
        store = a_store(own, place, tmp_path)
        claim, log = store.claim("job"), store.log("logs/job")
        assert claim is not None
        own.stop()
        again = a_store(own, place, tmp_path)
        for call in (
            lambda: again.read("a"),
            lambda: again.names("a"),
            lambda: again.write("a", b""),
            lambda: log.append(b"{}\n"),
            lambda: again.claim("job"),
        ):
            with pytest.raises(BatchStoreFailed, match="the store of batches failed"):
                call()
        # it is not lost yet
        claim.renew()
        assert claim.is_held
        own.start()
        again.write("a", b"1")
        log.append(b"{}\n")
        assert list(again.logged("logs/job")) == [b"{}\n"]


async def test_a_batch_runs_in_a_bucket(service: S3Service, place: str, tmp_path: Path) -> None:
    settings = {"s3": service.settings(str(tmp_path / "scratch"))}
    async with (
        a_batch_router(tmp_path, ScriptedBackend(), store=place, **settings) as router,
        openai_client(router) as client,
    ):
        batch = await ended(client, await begun(client, [a_line(number) for number in range(20)]))
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 20
        assert len(await lines_in(client, batch.output_file_id)) == 20


def test_copies_are_bounded(tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path, store="s", most_bytes=25)
    paths = [copies.get(str(number), lambda: [b"x" * 10]) for number in range(4)]
    assert paths[3].exists()
    assert sum(path.exists() for path in paths) == 2


def test_settings_do_not_show_secrets(service: S3Service) -> None:
    assert "a-secret-key" not in repr(replace(service.settings("s"), region=None))


@pytest.mark.parametrize("ignored", ["create", "e_tag"])
def test_a_service_that_ignores_one_of_the_conditions_stops_the_start(
    ignored: str, service: S3Service, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(service, place, tmp_path)
    put = store._claims._put

    def without(key: str, data: bytes, mode: Any) -> str | None:
        return put(key, data, "overwrite" if ignored in mode else mode)

    monkeypatch.setattr(store._claims, "_put", without)
    with pytest.raises(ConfigError, match="ignores conditions of writes"):
        store.open()
    assert store.names("claims") == []


def test_a_document_is_changed_on_what_was_read_and_a_lost_answer_is_no_conflict(
    store: S3BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[bytes | None]()

    def add(found: bytes | None) -> bytes | None:
        seen.append(found)
        if len(seen) == 2:
            # another router is faster
            store.write("jobs/acme/a", b"10")
        return None if found == b"11" else b"%d" % (int(found or b"0") + 1)

    store.change("jobs/acme/a", add)
    store.change("jobs/acme/a", add)
    assert (store.read("jobs/acme/a"), seen) == (b"11", [None, b"1", b"10"])
    # the service did it, and the request was sent again, as clients do without an answer
    real = store._bucket

    class Repeated:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def put(self, key: str, data: bytes, **options: Any) -> Any:
            real.put(key, data, **options)
            return real.put(key, data, **options)

    monkeypatch.setattr(store, "_bucket", Repeated())
    store.change("jobs/acme/b", lambda found: None if found == b"mine" else b"mine")
    assert store.read("jobs/acme/b") == b"mine"


def test_a_folder_for_temporary_files_that_another_user_has_made_stops_the_start(
    service: S3Service, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    settings = replace(service.settings(""), scratch=None)
    S3BatchStore(place, settings, clock=Clock()).open()
    (tmp_path / "pointsman-batches").rename(tmp_path / "theirs")
    (tmp_path / "pointsman-batches").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="another user has made it"):
        S3BatchStore(place, settings, clock=Clock()).open()

"""KV belongs to exactly these weights: the digest covers every byte, and what is remembered of it cannot be fooled."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shards import weight_files
from shards.model import Model
from shards.network.errors import BrokenCheckpoint
from shards.weight_files import DigestMemory, WeightFiles
from tests.shards.test_deterministic import model

__all__ = ["model"]

HOUR_S = 3600


def a_checkpoint(folder: Path, *, name: str = "model.safetensors") -> list[Path]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    torch.manual_seed(0)
    save_file({"a": torch.randn(20, 5), "b": torch.randn(5)}, folder / name)
    return [folder / "config.json", folder / name]


def digest_of(paths: list[Path], memory: DigestMemory | None = None, *, later_s: float = HOUR_S) -> str:
    """The digest of `paths`, read so long after they were written."""
    now_s = max(path.stat().st_ctime for path in paths) + later_s
    files = WeightFiles(paths, clock=lambda: now_s)
    try:
        return files.digest(memory)
    finally:
        files.close()


def test_equal_checkpoints_have_equal_digests_wherever_they_are(tmp_path: Path) -> None:
    assert digest_of(a_checkpoint(tmp_path / "x")) == digest_of(a_checkpoint(tmp_path / "y"))
    assert digest_of(a_checkpoint(tmp_path / "z", name="model-1-of-1.safetensors")) != digest_of(
        a_checkpoint(tmp_path / "x")
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_byte_counts(tmp_path: Path, data: st.DataObject) -> None:
    paths = a_checkpoint(tmp_path)
    before = digest_of(paths)
    path = data.draw(st.sampled_from(paths))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with path.open("r+b") as file:
        file.write(content)
    assert digest_of(paths) != before


def test_a_large_file_counts_to_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_PIECE_BYTES", 1000)
    path = tmp_path / "large"
    digests = set()
    for at in (None, 0, 999, 1000, 12_345, 49_999):
        content = bytearray(50_000)
        if at is not None:
            content[at] = 1
        path.write_bytes(content)
        digests.add(digest_of([path]))
    assert len(digests) == 6


def remembered(path: Path) -> dict[str, list[object]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_what_is_remembered_is_not_read_again(tmp_path: Path) -> None:
    paths, kept = a_checkpoint(tmp_path), tmp_path / "kv" / "weights.json"
    first = digest_of(paths, DigestMemory(kept))
    assert remembered(kept).keys() == {str(path) for path in paths}
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    # if it were read, this would change nothing
    kept.write_text(kept.read_text().replace(str(remembered(kept)[str(paths[1])][1]), "f" * 64))
    assert digest_of(paths, DigestMemory(kept)) != first


def in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def in_place_with_its_old_time(path: Path) -> None:
    before = path.stat()
    in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_another_file_of_its_time_and_size(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    in_place_with_its_old_time(other)
    other.replace(path)


def by_a_link_to_another_file(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    in_place_with_its_old_time(other)
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize(
    "replace",
    [in_place, in_place_with_its_old_time, by_another_file_of_its_time_and_size, by_a_link_to_another_file],
)
def test_what_was_replaced_is_read_again(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    paths, kept = a_checkpoint(tmp_path), tmp_path / "weights.json"
    before = digest_of(paths, DigestMemory(kept))
    replace(paths[1])
    after = digest_of(paths, DigestMemory(kept))
    assert after == digest_of(paths) != before


def test_a_file_that_was_written_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    """It may be written again within the same tick of the file system's clock."""
    paths, kept = a_checkpoint(tmp_path), tmp_path / "weights.json"
    digest_of(paths, DigestMemory(kept), later_s=1.0)
    assert remembered(kept) == {}


def with_garbage(kept: Path) -> None:
    kept.write_bytes(b'{"x": [[1, 2]')


def with_another_shape(kept: Path) -> None:
    kept.write_text('["a"]')


def that_others_may_write(kept: Path) -> None:
    kept.chmod(0o622)


def of_another_user(kept: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(kept, 12345, 12345)


def behind_a_link(kept: Path) -> None:
    kept.rename(kept.with_name("elsewhere"))
    kept.symlink_to(kept.with_name("elsewhere"))


def that_is_a_pipe(kept: Path) -> None:
    kept.unlink()
    os.mkfifo(kept)


def that_is_a_folder(kept: Path) -> None:
    kept.unlink()
    kept.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        with_garbage,
        with_another_shape,
        that_others_may_write,
        of_another_user,
        behind_a_link,
        that_is_a_pipe,
        that_is_a_folder,
    ],
)
def test_a_memory_that_cannot_be_trusted_is_not_read(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    paths, kept = a_checkpoint(tmp_path), tmp_path / "weights.json"
    honest = digest_of(paths, DigestMemory(kept))
    kept.write_text(kept.read_text().replace(str(remembered(kept)[str(paths[1])][1]), "f" * 64))
    spoil(kept)
    assert digest_of(paths, DigestMemory(kept)) == honest


def test_a_memory_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = a_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert digest_of(paths, DigestMemory(tmp_path / "file" / "weights.json")) == digest_of(paths)
    assert "cannot be kept" in caplog.text


def test_files_that_are_changed_while_they_are_read_are_refused(tmp_path: Path) -> None:
    paths = a_checkpoint(tmp_path)
    for replace in (in_place, by_another_file_of_its_time_and_size):
        files = WeightFiles(paths)
        files.begin()
        replace(paths[1])
        with pytest.raises(BrokenCheckpoint, match="changed while it was read"):
            files.digest()
        files.close()


def test_a_model_whose_files_change_while_it_is_loaded_is_refused(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    with pytest.raises(BrokenCheckpoint, match="changed while it was read"):
        Model.load(folder, on_files=lambda _: in_place(folder / "model.safetensors"))


def test_files_in_use_may_be_replaced_and_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "LOOK_EVERY_S", 0.0)
    paths = a_checkpoint(tmp_path)
    replaced, changed = WeightFiles(paths), WeightFiles(paths)
    by_another_file_of_its_time_and_size(paths[1])
    assert replaced.are_unchanged()
    in_place(paths[0])
    assert not changed.are_unchanged()
    assert not changed.are_unchanged()
    replaced.close()
    changed.close()

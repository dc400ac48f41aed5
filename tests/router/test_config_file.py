import os
from pathlib import Path

import pytest

from policies.errors import ConfigError
from router.config_file import ConfigFile


def test_a_file_is_read_with_what_it_refers_to(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    path = tmp_path / "sla.yaml"
    path.write_text(f"tenants: {{a: {{keys: ['${{env:KEY}}', '${{file:{tmp_path}/key}}']}}}}")
    contents = ConfigFile(path, {"KEY": "other"}).read()
    assert len(contents.config.tenants["a"].key_hashes) == 2
    assert contents.stamp == contents.source.stamp()


def test_mistakes_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    path.write_text("clases: {}")
    with pytest.raises(ConfigError, match=r"sla.yaml:1: clases: there is no 'clases' here \(did you mean 'classes'"):
        ConfigFile(path, {}).read()


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    with pytest.raises(ConfigError, match=r"cannot read .*sla\.yaml"):
        ConfigFile(path, {}).read()
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"cannot read .*sla\.yaml"):
        ConfigFile(path, {}).read()


def test_a_stamp_differs_when_the_file_changes_or_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    file = ConfigFile(path, {})
    stamps = [file.stamp()]
    path.write_text("a")
    stamps.append(file.stamp())
    os.utime(path, ns=(1, 1))
    stamps.append(file.stamp())
    path.write_text("ab")
    os.utime(path, ns=(1, 1))
    stamps.append(file.stamp())
    other = tmp_path / "new.yaml"
    other.write_text("xy")
    os.utime(other, ns=(1, 1))
    other.replace(path)
    stamps.append(file.stamp())
    assert stamps[0] is None
    assert len(set(stamps)) == 5

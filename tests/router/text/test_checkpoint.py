"""The places of a checkpoint's text files, and the errors of `pointsman check` for an unknown name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from policies.errors import ConfigError
from router.start.config_file import ConfigFile, Contents
from router.text.checkpoint import NoCheckpointError, check_template, directory_of, doubt_about, read_files, stamp_of
from tests.router.parts import some_assets


def a_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in some_assets().items():
        (directory / name).write_bytes(content)
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def a_hub_cache(home: Path) -> Path:
    """A Hugging Face home that has `acme/reader`, laid out as its own client does."""
    repository = home / "hub/models--acme--reader"
    a_checkpoint(repository / "snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    return home


def read(tmp_path: Path, pool: str) -> Contents:
    path = tmp_path / "sla.yaml"
    path.write_text(f"pools:\n  lm:\n    kind: vllm\n    at: http://10.0.0.1:8000\n{pool}")
    return ConfigFile(path, {"DIR": str(tmp_path)}).read()


def test_a_directory_gives_its_text_files_and_no_weights(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    assert directory_of(str(tmp_path)) == tmp_path
    assert read_files(tmp_path) == some_assets()
    assert doubt_about(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{}/none", "there is no directory .*none .name a directory"),
        ("./none", "there is no directory"),
        ("a b", "there is no directory"),
        ("a/b/c", "there is no directory"),
        ("{}", "has no tokenizer.json"),
    ],
)
def test_a_directory_that_is_none_is_refused_with_a_hint(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(NoCheckpointError, match=says):
        directory_of(name.format(tmp_path))


def test_a_stamp_differs_when_a_text_file_changes_or_appears(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    stamps = [stamp_of(tmp_path)]
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert stamp_of(tmp_path) == stamps[0]
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    stamps.append(stamp_of(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}!")
    stamps.append(stamp_of(tmp_path))
    assert len(set(stamps)) == 3


def test_check_names_the_line_of_a_tokenizer_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"    tokenizer: {tmp_path}/none\n    chat_template: {tmp_path}/none.jinja\n")
    first, second = caught.value.problems
    assert re.search(r"sla\.yaml:5: pools\.lm\.tokenizer: there is no directory .*none", first)
    assert re.search(r"sla\.yaml:6: pools\.lm\.chat_template: cannot read .*none\.jinja: No such file", second)


def test_check_names_the_line_of_a_template_with_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ bos_token }}\n{% for message in messages %}")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"    chat_template: {tmp_path}/chat.jinja\n")
    assert "is not a chat template, line 2: Unexpected end of template" in caught.value.problems[0]


def test_what_can_be_read_is_taken_also_by_reference(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    contents = read(tmp_path, "    tokenizer: ${env:DIR}\n    chat_template: " + f"{tmp_path}/chat.jinja\n")
    pool = contents.config.pools["lm"]
    assert (pool.tokenizer, pool.chat_template) == (str(tmp_path), f"{tmp_path}/chat.jinja")
    assert not [doubt for doubt in contents.doubts if "tokenizer" in doubt]
    check_template(f"{tmp_path}/chat.jinja")


def test_a_name_of_the_hub_is_read_from_the_local_cache_and_doubted_without(tmp_path: Path) -> None:
    home = a_hub_cache(tmp_path / "home")
    sla = tmp_path / "sla.yaml"

    def checked(tokenizer: str, home: Path) -> subprocess.CompletedProcess[str]:
        sla.write_text(f"pools: {{lm: {{kind: vllm, at: 'http://10.0.0.1:8000', tokenizer: {tokenizer}}}}}")
        environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        environment.pop("HF_HUB_CACHE", None)
        command = [sys.executable, "-P", "-m", "router", "check", str(sla)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    cached = checked("acme/reader", home)
    assert "is sound" in cached.stdout, cached.stderr
    assert "tokenizer" not in cached.stderr
    elsewhere = checked("acme/reader", tmp_path / "other")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert "acme/reader is neither a directory here nor in the local cache" in elsewhere.stderr

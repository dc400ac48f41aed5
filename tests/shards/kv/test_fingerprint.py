from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shards.kv.fingerprint import KvFacts, checkpoint_digest

FACTS = KvFacts("m", "digest", "bfloat16", (("bfloat16", (28, 2, 8, 64, 128)),))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weights": "others"},
        {"dtype": "float32"},
        {"layout": (("int8", (28, 2, 8, 64, 128)), ("float32", (28, 2, 8, 64)))},
        {"layout": (("bfloat16", (27, 2, 8, 64, 128)),)},
        {"numerics": "deterministic"},
        {"tensor_parallel": (0, 2)},
        {"tensor_parallel": (1, 2)},
    ],
    ids=str,
)
def test_every_fact_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert len(FACTS.fingerprint()) == 32
    assert replace(FACTS, **change).fingerprint() != FACTS.fingerprint() == replace(FACTS).fingerprint()


def a_checkpoint(folder: Path, *, seed: int = 0, config: str = "{}", name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    torch.manual_seed(seed)
    save_file({"a": torch.randn(100, 10), "b": torch.randn(5)}, folder / name)
    return folder


def test_equal_checkpoints_have_equal_digests_wherever_they_are(tmp_path: Path) -> None:
    assert checkpoint_digest(a_checkpoint(tmp_path / "x")) == checkpoint_digest(a_checkpoint(tmp_path / "y"))


def test_another_configuration_name_or_weight_is_another_digest(tmp_path: Path) -> None:
    """A fine-tune has the sizes and headers of its base."""
    digests = {
        checkpoint_digest(a_checkpoint(tmp_path / "base")),
        checkpoint_digest(a_checkpoint(tmp_path / "tuned", seed=1)),
        checkpoint_digest(a_checkpoint(tmp_path / "config", config='{"rope_theta": 1}')),
        checkpoint_digest(a_checkpoint(tmp_path / "named", name="model-1-of-1.safetensors")),
    }
    assert len(digests) == 4


def test_each_tensor_is_sampled(tmp_path: Path) -> None:
    before = checkpoint_digest(a_checkpoint(tmp_path / "x"))
    path = tmp_path / "x" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    assert checkpoint_digest(tmp_path / "x") != before


def test_a_large_checkpoint_is_not_read_whole(tmp_path: Path) -> None:
    folder = a_checkpoint(tmp_path / "x")
    save_file({"big": torch.zeros(2**22)}, folder / "model.safetensors")
    digest = checkpoint_digest(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    # outside the sample: the price of being cheap
    assert checkpoint_digest(folder) == digest


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"{}x", (2).to_bytes(8, "little") + b"no"]
)
def test_a_file_without_a_header_is_refused_or_holds_no_tensors(tmp_path: Path, content: bytes) -> None:
    folder = a_checkpoint(tmp_path / "x")
    (folder / "model.safetensors").write_bytes(content)
    if content[8:10] == b"{}":
        assert checkpoint_digest(folder)
    else:
        with pytest.raises(ValueError, match="header"):
            checkpoint_digest(folder)


def test_a_folder_without_a_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoint_digest(tmp_path)

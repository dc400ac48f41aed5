"""Quantised checkpoints that we write, read by our own loader; tests/engines has other programs read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shards.bundled import weights
from shards.kv.cache import KvCache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.errors import UnsupportedCheckpoint
from shards.network.loading import load_weights
from shards.quant.__main__ import app
from shards.quant.write import checkpoint
from shards.quant.write.checkpoint import write_quantised
from shards.quant.write.compare import compare
from shards.quant.write.forms import FormName, form_of
from shards.quant.write.matrices import matrices_of
from tests.shards.tiny_checkpoints import a_batch, save_checkpoint, some_tokens

FORMS: dict[FormName, tuple[float, float]] = {
    "fp8": (0.01, 0.04),
    "fp8-block": (0.01, 0.04),
    "int8": (0.002, 0.01),
    "int4": (0.05, 0.2),
}
"""By form: bounds of the mean relative error of a matrix of normal numbers."""


def logits_of(folder: Path) -> torch.Tensor:
    config = read_config(folder)
    loaded = load_weights(folder, config, dtype="float32", is_for_gpu=True)
    return Decoder(config, loaded).forward(a_batch((some_tokens(50), 0, (0,))), KvCache(config, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "phi3", "glm4"])
def test_a_written_checkpoint_is_read_again_with_the_error_that_was_named(
    tmp_path: Path, form: FormName, kind: str
) -> None:
    save_checkpoint(tmp_path / "plain", kind)
    written = write_quantised(tmp_path / "plain", tmp_path / "new", form)
    least, most = FORMS[form]
    assert least < written.mean_error < most
    assert written.mean_error <= written.largest_error < 2 * most
    assert written.bytes_after < written.bytes_before / 2
    difference = (logits_of(tmp_path / "new") - logits_of(tmp_path / "plain")).abs().mean()
    assert 0 < float(difference) < 20 * written.mean_error


@pytest.mark.parametrize("kind", ["mixtral", "deepseek v3", "gemma3, with images", "mistral3, with images"])
def test_experts_latent_attention_and_the_text_part_of_networks_with_images(tmp_path: Path, kind: str) -> None:
    save_checkpoint(tmp_path / "plain", kind)
    write_quantised(tmp_path / "plain", tmp_path / "new", "int8")
    stored = load_file(tmp_path / "new" / "model.safetensors")
    rounded = {name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dtype == torch.int8}
    left = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]["ignore"]
    assert len(rounded) >= len(matrices_of(read_config(tmp_path / "plain")))
    assert not rounded & set(left)
    assert not any("vision" in name or "embed" in name for name in rounded)
    assert torch.isfinite(logits_of(tmp_path / "new")).all()


def test_the_head_the_router_and_all_else_that_stays_are_named_for_other_engines(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", "qwen3 moe")
    for form, field in (("int4", "ignore"), ("fp8-block", "modules_to_not_convert")):
        write_quantised(tmp_path / "plain", tmp_path / form, form)  # type: ignore[arg-type]
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert config["quantization_config"][field] == ["lm_head", "model.layers.1.mlp.gate"]
        assert config["architectures"] == ["Qwen3MoeForCausalLM"]


def test_large_checkpoints_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "plain", "llama", shard_size="100KB")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 30_000)
    shares: list[float] = []
    write_quantised(
        tmp_path / "plain", tmp_path / "new", "fp8", on_progress=lambda done, total: shares.append(done / total)
    )
    index: dict[str, Any] = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "new").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > 2
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert torch.isfinite(logits_of(tmp_path / "new")).all()


def test_what_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", "qwen3")
    write_quantised(tmp_path / "plain", tmp_path / "new", "int8")
    with pytest.raises(UnsupportedCheckpoint, match="is quantised already"):
        write_quantised(tmp_path / "new", tmp_path / "again", "fp8")
    with pytest.raises(ValueError, match="is not empty; name a new folder"):
        write_quantised(tmp_path / "plain", tmp_path / "new", "fp8")
    with pytest.raises(ValueError, match="groups of 32, and a matrix has 72"):
        form_of("int4", [64, 72])
    assert form_of("int4", [4096, 192]) == form_of("int4", [64])


def test_the_difference_of_a_checkpoint_from_itself_is_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", "qwen3")
    same = compare(tmp_path / "plain", tmp_path / "plain")
    assert (same.tokens, same.divergence, same.agreement) == (512, 0.0, 1.0)
    write_quantised(tmp_path / "plain", tmp_path / "int8", "int8")
    write_quantised(tmp_path / "plain", tmp_path / "int4", "int4")
    finer, coarser = (compare(tmp_path / "plain", tmp_path / name) for name in ("int8", "int4"))
    assert 0 < finer.divergence < coarser.divergence
    assert coarser.agreement < finer.agreement < 1


def test_the_command_reports_sizes_and_errors(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The capital of Portugal is Lisbon.")
    words = ["bundled", str(tmp_path / "new"), "--to", "int8", "--text", str(text), "--threads", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "matrices in int8: " in done.output
    assert "MiB became" in done.output
    assert "error of a matrix: 0." in done.output
    assert "the most probable token is the same at" in done.output
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert f"cannot quantise {weights()}: " in again.output or "is not empty" in again.output
    missing = CliRunner().invoke(app, [str(tmp_path / "nothing"), str(tmp_path / "other")])
    assert missing.exit_code == 1
    assert "cannot be read" in missing.output

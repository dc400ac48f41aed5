"""Adapters that PEFT saved give the logits of PEFT, in every family; others are refused with the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.lora import checkpoint
from shards.lora.checkpoint import CONFIG, TENSORS, AdapterFormat
from shards.lora.options import AdapterOptions
from shards.lora.sites import sites_of
from shards.model import Model, PagedNetwork
from shards.network.config_file import read_config
from shards.network.errors import BrokenCheckpoint, CheckpointError, UnsupportedCheckpoint
from tests.shards.lora.adapters import ATTENTION, logits_of, save_adapter
from tests.shards.tiny_checkpoints import KINDS, a_batch, save_checkpoint, some_tokens

MODULES = r".*(q_proj|k_proj|v_proj|qkv_proj|o_proj|mlp\.(gate|up|gate_up|down)_proj)"
NOT_ADAPTED = {"deepseek v2", "deepseek v3", "deepseek v3, yarn"}
EXPERTS = {"mixtral", "gpt-oss", "qwen3 moe", "glm4 moe"}
WITH_IMAGES = {"mistral3, with images", "gemma3, with images"}


def modules_of(kind: str) -> Sequence[str] | str:
    if kind in EXPERTS:
        return ATTENTION
    # the part that sees images has projections of the same names
    return (
        r".*language_model.*(q_proj|k_proj|v_proj|o_proj|mlp\.(gate|up|down)_proj)" if kind in WITH_IMAGES else MODULES
    )


def adapted(folder: Path, adapter: Path, dtype: str = "auto") -> tuple[PagedNetwork, Any]:
    network = Model.load(folder, dtype=dtype).network
    assert isinstance(network, PagedNetwork)
    _, form = network.adapt(AdapterOptions())
    network.allocate(8)
    read = form.read(adapter, "x")
    assert form.size(adapter) == read.nbytes
    return network, read


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - NOT_ADAPTED))
def test_logits_are_those_of_peft_beside_rows_of_the_model_itself(tmp_path: Path, kind: str) -> None:
    theirs = save_adapter(save_checkpoint(tmp_path / "base", kind), tmp_path / "a", modules=modules_of(kind))
    network, adapter = adapted(tmp_path / "base", tmp_path / "a")
    tokens = some_tokens(140)
    batch = a_batch((tokens[:60], 0, [4]), (tokens, 0, [1, 2, 3]), (tokens[:40], 0, [5]))
    rows = (batch.rows[0], batch.rows[1]._replace(adapter=adapter), batch.rows[2])
    logits = network.forward(replace(batch, rows=rows))
    with theirs.disable_adapter():
        own = logits_of(theirs, tokens)
    tuned = logits_of(theirs, tokens)
    assert (tuned - own).abs().max() > 0.5
    torch.testing.assert_close(logits[60:200], tuned, atol=3e-4, rtol=0)
    torch.testing.assert_close(logits[:60], own[:60], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[200:], own[:40], atol=1e-4, rtol=0)


def test_logits_of_chosen_tokens_are_the_same_for_rows_that_are_not_adjacent(tmp_path: Path) -> None:
    theirs = save_adapter(save_checkpoint(tmp_path / "base", "qwen3"), tmp_path / "a")
    network, adapter = adapted(tmp_path / "base", tmp_path / "a")
    tokens = some_tokens(30)
    batch = a_batch((tokens, 0, [1]), (tokens[:9], 0, [2]), (tokens[:20], 0, [3]), wanted=[28, 29, 38, 50, 58])
    rows = (batch.rows[0]._replace(adapter=adapter), batch.rows[1], batch.rows[2]._replace(adapter=adapter))
    logits = network.forward(replace(batch, rows=rows))
    tuned = logits_of(theirs, tokens)
    torch.testing.assert_close(logits[[0, 1, 3, 4]], tuned[[28, 29, 11, 19]], atol=3e-4, rtol=0)
    with theirs.disable_adapter():
        torch.testing.assert_close(logits[2], logits_of(theirs, tokens)[8], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2}},
        {"alpha_pattern": {"o_proj": 3, r"layers\.0\.self_attn\.k_proj": 24}},
        {"modules": ("v_proj",)},
        {"modules": ("lm_head", "down_proj")},
        {"layers_to_transform": [1]},
        {"r": 1},
    ],
    ids=str,
)
def test_ranks_scales_and_modules_are_those_of_the_configuration(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = save_adapter(save_checkpoint(tmp_path / "base", "llama"), tmp_path / "a", **changes)
    network, adapter = adapted(tmp_path / "base", tmp_path / "a")
    tokens = some_tokens(40)
    batch = a_batch((tokens, 0, [1]))
    logits = network.forward(replace(batch, rows=(batch.rows[0]._replace(adapter=adapter),)))
    torch.testing.assert_close(logits, logits_of(theirs, tokens), atol=3e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "mean"), [("bfloat16", 0.1), ("int8", 0.2)])
def test_an_adapter_of_rounded_weights_is_near_that_of_exact_ones(tmp_path: Path, dtype: str, mean: float) -> None:
    theirs = save_adapter(save_checkpoint(tmp_path / "base", "qwen3"), tmp_path / "a")
    network, adapter = adapted(tmp_path / "base", tmp_path / "a", dtype=dtype)
    tokens = some_tokens(60)
    batch = a_batch((tokens, 0, [1]))
    logits = network.forward(replace(batch, rows=(batch.rows[0]._replace(adapter=adapter),)))
    assert (logits - logits_of(theirs, tokens)).abs().mean() < mean


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(save_checkpoint(folder / "base", "llama"), folder / "a", r=2, modules=("q_proj", "down_proj"))
    return folder


def changed(saved: Path, folder: Path, *, fields: dict[str, Any] | None = None, **tensors: Any) -> AdapterFormat:
    """The saved adapter in `folder`, with other fields and tensors; None removes one."""
    folder.mkdir()
    config = json.loads((saved / "a" / CONFIG).read_bytes())
    (folder / CONFIG).write_text(json.dumps(config | (fields or {})))
    held = load_file(saved / "a" / TENSORS)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, folder / TENSORS)
    return AdapterFormat(sites_of(read_config(saved / "base")), torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peft_type", "LOHA", "peft_type is LOHA"),
        ("bias", "all", "bias is all"),
        ("use_dora", True, "use_dora is True"),
        ("modules_to_save", ["lm_head"], r"modules_to_save is \['lm_head'\]"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "target_parameters is"),
        ("alora_invocation_tokens", [1, 2], "alora_invocation_tokens is"),
    ],
)
def test_configurations_that_compute_something_else_are_refused(
    saved: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    form = changed(saved, tmp_path / "x", fields={field: value})
    with pytest.raises(UnsupportedCheckpoint, match=message):
        form.read(tmp_path / "x", "x")


LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            f"{LAYER}.self_attn.q_proj.lora_A.weight",
            None,
            "one matrix of model.layers.0.self_attn.q_proj instead of two",
        ),
        (
            f"{LAYER}.self_attn.q_proj.lora_A.weight",
            torch.zeros(2, 65),
            r"shape \(2, 65\), and this model needs \(2, 64\)",
        ),
        (
            f"{LAYER}.self_attn.q_proj.lora_B.weight",
            torch.zeros(64, 3),
            r"shape \(64, 3\), and this model needs \(64, 2\)",
        ),
        (f"{LAYER}.self_attn.q_proj.lora_A.weight", torch.zeros(2), r"shape \(2,\); a matrix is needed"),
        (f"{LAYER}.self_attn.q_proj.lora_magnitude_vector", torch.zeros(64), "changes what no adapter can change here"),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", torch.zeros(2, 64), "layers.7.mlp.up_proj"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(2, 97), "not embeddings or experts"),
        (f"{LAYER}.self_attn.q_proj.lora_A.weight", torch.zeros(2, 64, dtype=torch.int8), "is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    saved: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    form = changed(saved, tmp_path / "x", **{name: tensor})
    with pytest.raises(CheckpointError, match=message):
        form.read(tmp_path / "x", "x")


def test_files_that_are_no_adapter_are_refused(saved: Path, tmp_path: Path) -> None:
    form = changed(saved, tmp_path / "x")
    (tmp_path / "x" / CONFIG).write_text('{"peft_type": "LORA", "r": "four"}')
    with pytest.raises(BrokenCheckpoint, match="not the configuration of an adapter"):
        form.read(tmp_path / "x", "x")
    (tmp_path / "x" / CONFIG).write_text("[" * 100_000)
    with pytest.raises(BrokenCheckpoint, match="not the configuration of an adapter"):
        form.read(tmp_path / "x", "x")
    deep = (100_000).to_bytes(8, "little") + b"[" * 100_000
    whole = ((b"\xff" * 16, "its header has"), (b"abc", "cannot be read"), (b"", "cannot be read"), (deep, "recursion"))
    for content, message in whole:
        (tmp_path / "x" / TENSORS).write_bytes(content)
        with pytest.raises(BrokenCheckpoint, match=message):
            form.size(tmp_path / "x")
    (tmp_path / "x" / TENSORS).unlink()
    with pytest.raises(BrokenCheckpoint, match="is missing"):
        form.size(tmp_path / "x")


def test_the_digest_is_that_of_weights_and_configuration(saved: Path, tmp_path: Path) -> None:
    digests = [
        changed(saved, tmp_path / "same").read(tmp_path / "same", "x").digest,
        changed(saved, tmp_path / "again").read(tmp_path / "again", "y").digest,
        changed(saved, tmp_path / "scaled", fields={"lora_alpha": 13}).read(tmp_path / "scaled", "x").digest,
    ]
    name = f"{LAYER}.self_attn.q_proj.lora_A.weight"
    weights = load_file(saved / "a" / TENSORS)[name].clone()
    weights[0, 0] += 1e-3
    digests.append(changed(saved, tmp_path / "other", **{name: weights}).read(tmp_path / "other", "x").digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_an_adapter_whose_tensors_change_while_it_is_read_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV would be kept as that of the tensors before."""
    form = changed(saved, tmp_path / "x")
    opened = checkpoint._opened

    def changed_first(path: Path) -> Any:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x00\x00\x80\x3f")
        return opened(path)

    monkeypatch.setattr(checkpoint, "_opened", changed_first)
    with pytest.raises(BrokenCheckpoint, match="changed while it was read"):
        form.read(tmp_path / "x", "x")

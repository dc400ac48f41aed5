"""Files in GGUF, written from tiny checkpoints in the order of llama.cpp's converter, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from shards.gguf.folder import INDEX, folder_of
from shards.gguf.tokens import PATTERNS
from shards.kv.cache import KvCache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.errors import CheckpointError
from shards.network.loading import load_weights
from shards.quant.int4 import Int4Linear
from tests.shards.tiny_checkpoints import VOCABULARY, a_batch, save_checkpoint, some_tokens

gguf = pytest.importorskip("gguf", reason="the reader of GGUF is not installed")

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
KINDS = {
    "llama": "llama",
    "llama, tied head": "llama",
    "llama, llama3 rope": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
FORMS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def _name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{end}"


def write(folder: Path, kind: str, form: str = "F32", **changes: Any) -> tuple[Path, Any]:
    """A tiny checkpoint of `kind` as a file in GGUF, its matrices in `form`; and the model of transformers."""
    model, architecture = save_checkpoint(folder, kind), KINDS[kind]
    config, file = model.config, folder / "tiny.gguf"
    out = gguf.GGUFWriter(file, changes.get("architecture", architecture))
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    out.add_key_length(head)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    out.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "llama3":
        turning = 1.0 / rope["rope_theta"] ** (torch.arange(0, head, 2) / head)
        out.add_tensor("rope_freqs.weight", (turning / model.model.rotary_emb.inv_freq).float().numpy())
    for name, value in changes.get("scaling", {}).items():
        (out.add_string if isinstance(value, str) else out.add_float32)(f"{architecture}.rope.{name}", value)
    words = [f"<{number}>" for number in range(VOCABULARY)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(changes.get("pre", "qwen2"))
    out.add_token_list(words)
    out.add_token_types([3, 3, 3, *[1] * (VOCABULARY - 3)])
    out.add_token_merges([])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_eot_token_id(0)
    out.add_chat_template("{{ messages }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = tensor.float()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            numbers = numbers.view(heads, 2, head // 2, -1).transpose(1, 2).reshape(tensor.shape)
        stored = gguf.GGMLQuantizationType[form if tensor.dim() > 1 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(numbers.numpy()), stored)
        out.add_tensor(_name(name), data, raw_dtype=stored)
        if tensor.dim() > 1:
            # the same rounded numbers for transformers
            rounded = torch.from_numpy(np.array(gguf.quants.dequantize(data, stored))).view(numbers.shape)
            if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                rounded = rounded.view(heads, head // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
            tensor.copy_(rounded)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file, model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _differs_by(folder: Path, theirs: Any) -> float:
    config, tokens = read_config(folder), some_tokens(70)
    decoder = Decoder(config, load_weights(folder, config, dtype="float32"))
    ours = decoder.forward(a_batch((tokens, 0, (1, 2))), KvCache(config, 4))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0].float()
    return float((ours - expected).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_each_family_gives_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    file, theirs = write(tmp_path, kind)
    folder = folder_of(file)
    assert _differs_by(folder, theirs) < 1e-3
    assert read_config(folder).eos_token_ids == {0, 2}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_numbers_that_it_holds(tmp_path: Path, form: str) -> None:
    file, theirs = write(tmp_path, "llama", form)
    assert _differs_by(folder_of(file), theirs) < 2e-3


def test_four_bits_stay_four_bits(tmp_path: Path) -> None:
    file, _ = write(tmp_path, "llama", "Q4_0")
    folder = folder_of(file)
    weights = load_weights(folder, read_config(folder))
    assert weights.dtype == torch.bfloat16
    assert any(isinstance(layer.attention.linear_out, Int4Linear) for layer in weights.layers)  # type: ignore[attr-defined]


def test_the_folder_has_the_files_own_tokenizer_template_and_ends(tmp_path: Path) -> None:
    folder = folder_of(write(tmp_path, "qwen2")[0])
    assert folder.name == "tiny"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"bos_token": "<1>", "eos_token": "<2>"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<1><2>").ids == [1, 2]


def test_a_file_that_was_replaced_has_another_folder(tmp_path: Path) -> None:
    file, _ = write(tmp_path, "qwen2")
    first = folder_of(file)
    assert folder_of(file) == first
    write(tmp_path, "qwen2", "Q8_0")
    assert folder_of(file) != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "holds the architecture 'mamba'; in GGUF shards serve llama"),
        ({"pre": "unheard"}, "cuts texts by 'unheard' .*gpt-2, olmo"),
        ({"scaling": {"scaling.type": "longrope", "scaling.factor": 2.0}}, "scales rope by 'longrope'"),
        ({"scaling": {"scaling.type": "yarn"}}, "scales rope by 'yarn', and no factor is given"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file, _ = write(tmp_path, "qwen2", **changes)
    with pytest.raises(CheckpointError, match=message):
        folder_of(file)


def _load(file: Path) -> None:
    folder = folder_of(file)
    load_weights(folder, read_config(folder))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_a_file_that_is_cut_short_is_said(tmp_path: Path, share: float) -> None:
    file, _ = write(tmp_path, "qwen2")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"download|cannot be read|missing|must be"):
        _load(file)


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, ("linear", 4.0)),
        ({"scale_linear": 2.0}, ("linear", 2.0)),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, ("yarn", 4.0)),
        ({"scaling.type": "none"}, ("default", 1.0)),
    ],
)
def test_a_scaled_rope_is_read(tmp_path: Path, scaling: dict[str, Any], rope: tuple[str, float]) -> None:
    found = read_config(folder_of(write(tmp_path, "qwen2", scaling=scaling)[0])).rope
    assert (found.kind, found.factor) == rope


def test_a_tensor_that_no_layer_takes_is_said(tmp_path: Path) -> None:
    folder = folder_of(write(tmp_path, "qwen2")[0])
    index = json.loads((folder / INDEX).read_text())
    index["tensors"]["blk.0.odd.weight"] = index["tensors"]["blk.0.attn_q.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"odd\.weight has no place"):
        load_weights(folder, read_config(folder))


def test_all_patterns_cut_a_text_without_losing_a_letter() -> None:
    from tokenizers import Regex, pre_tokenizers

    text = "The 12345 dogs' café, 九十 天下\n\n  x=y+1\t🙂"
    for patterns in PATTERNS.values():
        cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
        assert "".join(piece for piece, _ in cuts.pre_tokenize_str(text)) == text

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from shards.network.config import NetworkConfig, Rope
from shards.network.config_file import read_config
from shards.network.errors import BrokenCheckpoint, CheckpointError, UnsupportedCheckpoint
from shards.network.families.table import ARCHITECTURES

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
ROPE = Rope(original_positions=2048)
DEEPSEEK: dict[str, Any] = {"moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> NetworkConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_what_is_left_out_means_what_transformers_takes_it_to_mean(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (4, 8, 8, 8)
    assert config.rope == ROPE
    assert config.windows == (None,) * 4
    assert not any((config.tied_head, config.qkv_bias, config.output_bias, config.mlp_bias, config.query_key_norm))


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    old = read(tmp_path, rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"})
    new = read(tmp_path, rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 500_000})
    assert old == new
    assert new.rope == replace(ROPE, kind="llama3", theta=5e5, factor=8.0, original_positions=512)


def test_yarn_without_a_factor_takes_it_from_the_lengths(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 512})
    assert config.rope.factor == 4.0


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Llama", {"sliding_window": 9, "attention_bias": True}, ((None,) * 4, True, True, False, 8)),
        ("Mistral", {}, ((4096,) * 4, False, False, False, 8)),
        ("Mistral", {"sliding_window": None}, ((None,) * 4, False, False, False, 8)),
        ("Mistral", {"sliding_window": 9, "head_dim": 32}, ((9,) * 4, False, False, False, 32)),
        ("Qwen2", {"sliding_window": 9}, ((None,) * 4, True, False, False, 8)),
        (
            "Qwen2",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            ((None, None, None, 9), True, False, False, 8),
        ),
        (
            "Qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            ((9, None, 9, None), False, False, True, 128),
        ),
    ],
)
def test_families_differ_in_windows_biases_and_norms(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    config = read(tmp_path, architectures=[f"{family}ForCausalLM"], **changes)
    found = (config.windows, config.qkv_bias, config.output_bias, config.query_key_norm, config.head_dim)
    assert found == expected


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == frozenset()
    assert read(tmp_path, eos_token_id=7).eos_token_ids == {7}
    assert read(tmp_path, generation={"eos_token_id": [3, 4]}, eos_token_id=7).eos_token_ids == {3, 4, 7}


def test_an_end_token_without_a_logit_is_nothing_that_could_be_forbidden(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[7, 99, 100, -1]).eos_token_ids == {7, 99}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.*MistralForCausalLM"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic .*llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "caps of logits"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 9.0}, "swiglu_limit 9 with swiglu_alpha 1.702"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"} | DEEPSEEK, "topk_method noaux_tc"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantized \(bitsandbytes\); .*awq, gptq"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "linear_attention"] * 2,
            },
            "layers of type linear_attention .*sliding_attention",
        ),
    ],
)
def test_what_is_not_supported_is_named_with_a_hint(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message) as caught:
        read(tmp_path, **changes)
    assert caught.value.hint


def test_an_architecture_with_other_fields_is_named_before_any_field_is_missed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "n_embd": 768}))
    with pytest.raises(UnsupportedCheckpoint) as caught:
        read_config(tmp_path)
    assert str(caught.value) == (
        f"architecture GPT2LMHeadModel is not supported; a shard serves {', '.join(ARCHITECTURES)} "
        "(serve it with another engine, in a pool of that engine's kind)"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "of model type gpt2 is not supported"),
        ({"hidden_size": 64}, "names neither `architectures` nor a `model_type`"),
    ],
)
def test_a_file_without_an_architecture_is_refused_by_its_model_type(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "big"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_key_value_heads": 3}, "8 heads do not share 3"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, "4 numbers in long_factor"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.4}, "rope on 3 numbers"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8, "num_experts": 2},
            "8 experts compute each token, and num_experts is 2",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"head_dim": "x"}},
            "text_config: .*head",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "rope parameters.*factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope parameters.*factor"),
        ({"rope_scaling": {"factor": 2.0}}, "scaled by 2, but no rope type is given"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}}, "high_freq_factor above"),
        ({"rope_theta": 1.0}, r"\$.rope_theta"),
        ({"num_hidden_layers": 0}, r"\$.num_hidden_layers"),
        ({"num_attention_heads": 0}, r"\$.num_attention_heads"),
        ({"vocab_size": 0}, r"\$.vocab_size"),
        ({"head_dim": 7}, "head of 7 numbers"),
        ({"hidden_size": 4}, "head of 0 numbers"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, r"\$.sliding_window"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"],
            },
            "names 1 layers",
        ),
    ],
)
def test_a_slip_in_the_file_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenCheckpoint, match=message):
        read(tmp_path, **changes)


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match=r"config\.json cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b"{", b'{"\xff', b'{"architectures":' + b"[" * 100_000])
def test_a_config_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=r"config\.json"):
        read_config(tmp_path)

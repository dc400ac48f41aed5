"""The fields of config.json files as they are published, and the networks that they describe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shards.network.config import Experts, Latent, NetworkConfig, Rope
from shards.network.config_file import read_config

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
QWEN3_8B_YARN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B_YARN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
PHI_4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
GLM_4_9B: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "vocab_size": 151552,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
MISTRAL_SMALL_31: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
}


def read(folder: Path, fields: dict[str, Any]) -> NetworkConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_config(folder)


def test_llama_3_1_has_its_full_context(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_31_8B)
    assert config.max_positions == 131_072
    assert config.rope == Rope("llama3", 5e5, 8.0, 8192)


def test_yarn_lengthens_the_context_beyond_the_number_in_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3_8B_YARN).max_positions == 131_072
    assert read(tmp_path, QWEN3_8B_YARN | {"rope_scaling": None}).max_positions == 40_960


def test_qwen3_moe_has_experts_in_every_layer_that_is_not_named(tmp_path: Path) -> None:
    experts = Experts(128, 8, 768, frozenset(range(48)))
    assert read(tmp_path, QWEN3_30B_A3B).experts == experts
    some = read(tmp_path, QWEN3_30B_A3B | {"mlp_only_layers": [0], "decoder_sparse_step": 2}).experts
    assert some is not None
    assert some.layers == frozenset(range(1, 48, 2))


def test_mixtral_has_experts_as_wide_as_mistrals_mlp(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL_8X7B)
    assert config.experts == Experts(8, 2, 14336, frozenset(range(32)))
    assert set(config.windows) == {None}


def test_gemma_3_sees_everything_in_every_sixth_layer_with_a_rope_of_its_own(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_3_4B)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (config.rope_of(5).theta, config.rope_of(5).factor) == (1e6, 8.0)
    assert (config.rope_of(0).theta, config.rope_of(0).kind) == (1e4, "default")
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.tied_head, config.attention_scale, config.eos_token_ids) == (True, 1 / 16, {1, 106})


def test_phi_4_mini_rotates_96_of_128_numbers_by_its_long_factors(tmp_path: Path) -> None:
    config = read(tmp_path, PHI_4_MINI)
    assert (config.rope.kind, config.rope.dims, config.rope.factor) == ("longrope", 96, 32.0)
    assert config.rope.factors == (2.0,) * 48
    short = read(tmp_path, PHI_4_MINI | {"max_position_embeddings": 4096})
    assert short.rope.factors == (1.0,) * 48


def test_glm_4_rotates_half_of_a_head_by_neighbours(tmp_path: Path) -> None:
    rope = read(tmp_path, GLM_4_9B).rope
    assert (rope.dims, rope.is_interleaved) == (64, True)
    order = rope.order(8 * 16)
    assert order is not None
    assert order[:3] == [0, 2, 4]
    assert order[64:67] == [1, 3, 5]
    assert sorted(order) == list(range(128))


def test_gpt_oss_alternates_windows_and_may_be_in_mxfp4(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS_20B)
    assert config.windows == (128, None) * 12
    assert config.has_sinks
    assert config.experts is not None
    assert (config.experts.count, config.experts.scoring) == (32, "softmax_chosen")
    assert config.max_positions == 131_072


def test_deepseek_keeps_576_numbers_of_each_token(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V2_LITE)
    assert config.latent == Latent(512, 64, 128, 128)
    assert (config.kv_planes, config.kv_heads, config.head_dim) == (1, 1, 576)
    assert config.experts is not None
    assert (config.experts.shared_inner, config.experts.layers) == (2816, frozenset(range(1, 27)))
    # YaRN sharpens the scores by the square of 0.1 * 0.707 * ln 40 + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)


def test_the_text_part_of_mistral_3_is_a_mistral(tmp_path: Path) -> None:
    config = read(tmp_path, MISTRAL_SMALL_31)
    assert (config.layers, config.head_dim, config.max_positions) == (40, 128, 131_072)
    assert not config.tied_head

"""Tiny random Hugging Face checkpoints of every family, and batches to run them on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.exec.batch import Batch, Row
from shards.kv.keys import BLOCK_TOKENS

VOCABULARY = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # wide enough that logits spread over several units, so that 1e-4 between them means something
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    # all prompts of several tokens are longer: for others transformers takes the short factors
    "original_max_position_embeddings": 4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 5.0],
}
_MINISTRAL3 = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, "num_key_value_heads": 1},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral, window": ("Mistral", {"sliding_window": 50}),
    "ministral, window in some layers": (
        "Ministral",
        {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2, window from layer 1, yarn": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "rope_parameters": _YARN},
    ),
    "mistral3, growing queries": ("Ministral3", {"head_dim": 32, "rope_parameters": _MINISTRAL3}),
    "mistral3, with images": ("Mistral3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"sliding_window": 60}),
    "phi3, part of each head, longrope": (
        "Phi3",
        {"tie_word_embeddings": True, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 4},
    ),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True}),
    "glm4 moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "query_pre_attn_scalar": 48,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3, with images": ("Gemma3", {}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        _LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.2,
        },
    ),
    "deepseek v3": ("DeepseekV3", _LATENT | {"q_lora_rank": 24}),
    "deepseek v3, yarn": (
        "DeepseekV3",
        _LATENT | {"q_lora_rank": None, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, yarn with mscale": (
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
}
"""By name: the family and what its configuration changes."""


_WITH_IMAGES = {
    "mistral3, with images": ("Ministral3Config", "mistral3, growing queries"),
    "gemma3, with images": ("Gemma3TextConfig", "gemma3"),
}
"""By name: the configuration of the text part, and the kind with the same changes."""


def save_checkpoint(folder: Path, kind: str, *, shard_size: str = "1GB", dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of this kind, with seeded weights, norms and biases included; it is saved in `folder`."""
    import transformers

    family, changes = KINDS[kind]
    torch.manual_seed(sum(kind.encode()))
    if kind in _WITH_IMAGES:
        text = getattr(transformers, _WITH_IMAGES[kind][0])(**(_COMMON | KINDS[_WITH_IMAGES[kind][1]][1]))
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14}
        config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    else:
        config = getattr(transformers, f"{family}Config")(**(_COMMON | changes))
        model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("norm.weight", "layernorm.weight")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return model


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """Seeded token ids."""
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def a_batch(*rows: tuple[Sequence[int], int, Sequence[int]], wanted: Iterable[int] | None = None) -> Batch:
    """A batch of rows (new token ids, tokens computed before, block ids); logits of all tokens or those `wanted`."""
    token_ids: list[int] = []
    positions: list[Tensor] = []
    slots: list[Tensor] = []
    made: list[Row] = []
    for new, computed, blocks in rows:
        context = computed + len(new)
        at = torch.arange(computed, context)
        made.append(Row(len(token_ids), len(new), context, tuple(blocks)))
        positions.append(at)
        slots.append(torch.tensor(blocks)[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
        token_ids += new
    return Batch(
        token_ids=torch.tensor(token_ids),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        rows=tuple(made),
        logit_rows=torch.tensor(list(range(len(token_ids)) if wanted is None else wanted), dtype=torch.int64),
    )

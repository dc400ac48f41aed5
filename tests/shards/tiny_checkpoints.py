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
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2, window from layer 1, yarn": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "rope_parameters": _YARN},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, yarn with mscale": (
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
}
"""By name: the family and what its configuration changes."""


def save_checkpoint(folder: Path, kind: str, *, shard_size: str = "1GB", dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of this kind, with seeded weights, norms and biases included; it is saved in `folder`."""
    import transformers

    family, changes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**(_COMMON | changes))
    torch.manual_seed(sum(kind.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
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

"""A tiny LoRA adapter of the bundled model, in the format of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from shards.bundled import weights

RANK = 8


def an_adapter(folder: Path, name: str, *, seed: int) -> Path:
    """A folder with an adapter of random weights, which change answers."""
    config = json.loads((weights() / "config.json").read_text())
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * 0.1
        tensors[f"{at}.lora_B.weight"] = torch.randn(heads * head_dim, RANK, generator=random) * 0.1
    at = folder / name
    at.mkdir()
    save_file(tensors, at / "adapter_model.safetensors")
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(weights()),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
        "inference_mode": True,
    }
    (at / "adapter_config.json").write_text(json.dumps(adapter_config))
    return at

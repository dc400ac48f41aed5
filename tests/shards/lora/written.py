"""Adapters in PEFT's format with random numbers, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file

from shards.lora.checkpoint import CONFIG, TENSORS
from shards.lora.sites import sites_of
from shards.network.config import NetworkConfig


def write_adapter(
    folder: Path, config: NetworkConfig, *, rank: int, seed: int, matrices: Collection[str] | None = None
) -> Path:
    """An adapter in `folder` of all matrices of the network of `config`, or of those with a name that ends so."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[1] ** 0.5

    tensors = {}
    for site in sites_of(config):
        if matrices is None or site.name.rpartition(".")[2] in matrices:
            for part in site.parts:
                name = f"base_model.model.{part.module}"
                tensors[f"{name}.lora_A.weight"] = draw(rank, site.inputs)
                tensors[f"{name}.lora_B.weight"] = draw(part.stop - part.start, rank)
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder

"""Adapters of tiny checkpoints, made and saved by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: Any, folder: Path, *, seed: int = 0, modules: Sequence[str] | str = ALL_LINEAR, **changes: Any
) -> Any:
    """PEFT's model with a seeded adapter on the transformers `model`, which is saved in `folder`.

    The model is changed in place: its own logits come from a context of `disable_adapter`.
    """
    from peft import LoraConfig, get_peft_model

    targets = modules if isinstance(modules, str) else list(modules)
    config = LoraConfig(**({"r": 4, "lora_alpha": 12, "target_modules": targets} | changes))
    with _peft():
        tuned = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    with _peft():
        tuned.save_pretrained(folder)
    return tuned.eval()


def load_adapter(model: Any, folder: Path) -> Any:
    """PEFT's model with the adapter in `folder` on the transformers `model`."""
    from peft import PeftModel

    with _peft():
        return PeftModel.from_pretrained(model, folder).eval()


@contextmanager
def _peft() -> Iterator[None]:
    """PEFT asks for attributes that transformers deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """The logits of all tokens, [tokens, vocabulary]."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()  # type: ignore[no-any-return]

"""Where the real models are, and prompts for them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

from tests.models.truth import Truth

SMOLLM2 = "SmolLM2-135M-Instruct"
ROOT = Path(__file__).parents[2]

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Translate 'good morning' into Spanish, German and Japanese (日本語).",
    "Name three prime numbers above 50, as a JSON list.",
    "Wie heißt die Hauptstadt von Österreich? 🙂",
    "Write a Python function that reverses a string.",
    "Who wrote 'Pride and Prejudice', and when?",
)


def folder_of(name: str) -> Path | None:
    """The checkpoint of a model that `make models` has fetched; None if it has not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("MODELS") or cache / "pointsman" / "models") / name
    return folder if (folder / ".ready").exists() else None


def truth_of(folder: Path, *, dtype: torch.dtype = torch.float32, rounding: float = 0.002) -> Truth:
    """The checkpoint in transformers. In float32, log-probabilities of two programs were seen to differ by 0.00002."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return Truth(model, rounding=rounding, tokenizer=tokenizer_of(folder), eos=frozenset({model.config.eos_token_id}))


def tokenizer_of(folder: Path) -> Any:
    """transformers' tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chat(tokenizer: Any, *turns: str, **more: Any) -> list[int]:
    """The prompt of a conversation: users' and assistant's turns by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    tokens: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more)
    return tokens


def page(seed: int, characters: int) -> str:
    """A piece of one of our pages: prose, tables and code."""
    rng = random.Random(seed)
    text = rng.choice(sorted((ROOT / "docs").glob("*.md"))).read_text()
    start = rng.randrange(max(1, len(text) - characters))
    return text[start : start + characters]

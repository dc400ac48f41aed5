"""The tokenizer of the bundled model: byte-level, so it encodes any text, and trained on the generator's words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from shards.bundled import documents

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|tool|>"}
SPECIAL = (PAD, BOS, END, *ROLES.values())
SIZE = 1536

# Each newline and each digit is a token of its own: no merge crosses a newline, so text cut there keeps its ids.
_WORDS = r"\n| ?\d| ?\p{L}+| ?[^\s\p{L}\d]+|[^\S\n]+(?!\S)|[^\S\n]"

CHAT_TEMPLATE = (
    "{{- '<|bos|>' -}}"
    "{%- if tools is defined and tools -%}"
    "{{- '<|system|>Tools: ' -}}{{- tools | tojson -}}{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + ('system' if message['role'] == 'developer' else message['role']) + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- elif message['content'] is defined and message['content'] -%}"
    "{%- for part in message['content'] -%}{{- part['text'] if part['type'] == 'text' else '' -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- if message['tool_calls'] is defined and message['tool_calls'] -%}"
    "{{- message['tool_calls'] | tojson -}}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt is defined and add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def learn(seed: int, size: int = SIZE) -> Tokenizer:
    """A tokenizer in which every word of the synthetic documents is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each special token."""
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in SPECIAL}


def save(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLES.values()),
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _corpus(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(1500):
        text = documents.document(rng, 40, "train")
        yield documents.prompt(text.text, text.questions[0].question)
        yield documents.reworded(text.questions[1], rng).question
        yield documents.small_talk(rng).question
    for _ in range(20):
        yield "\n".join((documents.ABSENT, documents.INTRODUCTION, *documents.SMALL_TALK, *documents.REMARKS))

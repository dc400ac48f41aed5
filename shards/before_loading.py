"""What is wrong with a checkpoint, said before its weights are read: reading them may take minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from shards.network.errors import BrokenCheckpoint

_FETCH = "models are not downloaded: fetch one with `hf download ORG/NAME --local-dir ./NAME`"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class TokenSet:
    """The tokens of the model called `name`: `vocabulary` logits, and a `tokenizer` if it has one."""

    name: str
    vocabulary: int
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, folder: Path) -> TokenSet:
        """Those of the checkpoint in `folder`. Raises CheckpointError."""
        from shards.network.config_file import read_config

        require_checkpoint(folder)
        return cls(folder.resolve().name, read_config(folder).vocab_size, tokenizer_in(folder))


def require_checkpoint(folder: Path) -> None:
    """Raise BrokenCheckpoint if no checkpoint is in `folder`, with what there is instead."""
    if not folder.exists():
        raise BrokenCheckpoint(f"there is no directory {folder}", hint=_FETCH)
    if not folder.is_dir():
        hint = "name the directory with config.json and *.safetensors, or a file in GGUF"
        raise BrokenCheckpoint(f"{folder} is a file", hint=hint)
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        hint = f"serve its base model, with --lora {folder.name}={folder}"
        raise BrokenCheckpoint(f"{folder} is a LoRA adapter and no model", hint=hint)
    inner = sorted(found.parent.name for found in folder.glob("*/config.json"))[:3]
    hint = f"did you mean {folder / inner[0]}?" if inner else "a checkpoint has config.json and *.safetensors"
    raise BrokenCheckpoint(f"{folder} has no config.json", hint=hint)


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer of the checkpoint in `folder`; None if it has none. Raises BrokenCheckpoint."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        # tokenizers raises bare Exception for every fault of the file
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error


def doubts_about(folder: Path) -> Iterator[str]:
    """Sentences about what the checkpoint in `folder` lacks: it can be served, but not for all requests."""
    if not (folder / "tokenizer.json").is_file():
        has_other = (folder / "tokenizer.model").is_file()
        how = "transformers writes it with `save_pretrained`" + (", of tokenizer.model" if has_other else "")
        yield f"{folder} has no tokenizer.json, so clients have to send token ids ({how})"
    elif not _has_template(folder):
        yield (
            f"{folder} has no chat template, so /v1/chat/completions and its like are refused, and /v1/completions is"
            " served (put chat_template.jinja there, or use the model that is tuned for chats)"
        )


def require_same_tokens(draft: TokenSet, model: TokenSet) -> None:
    """Raise ValueError unless each token id means the same to both. Logits may be padded to different sizes."""
    own, other = draft.tokenizer, model.tokenizer
    if own is None or other is None:
        own_size, other_size, difference = draft.vocabulary, model.vocabulary, "one of them has no tokenizer"
        is_same = own is other and own_size == other_size
    else:
        ids, others = own.get_vocab(), other.get_vocab()
        own_size, other_size, is_same = len(ids), len(others), ids == others
        first = min((token for _, token in ids.items() ^ others.items()), default=0)
        difference = f"the first that differs is {first}"
    if not is_same:
        raise ValueError(
            f"the draft model {draft.name} has {own_size} tokens and {model.name} has {other_size}, and they are not "
            f"the same ({difference}): choose a draft model with the same tokenizer"
        )


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in _TEMPLATES):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))

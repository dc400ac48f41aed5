"""A folder for a GGUF file, with the files of a checkpoint that all else reads, and a link to the file itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shards.gguf.header import GgufHeader
from shards.gguf.tokens import tokenizer_of

WEIGHTS, INDEX = "model.gguf", "tensors.json"
_FORM = 1
"""Counts up when the files here are made in another way."""


def folder_of(file: Path) -> Path:
    """The folder of the GGUF file at `file`, made anew if the file is another one than before.

    Raises CheckpointError, or OSError if the folder cannot be written.
    """
    file = file.resolve()
    status = file.stat()
    identity = f"{_FORM} {file} {status.st_size} {status.st_mtime_ns}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman" / "gguf"
    folder = base / hashlib.sha256(identity.encode()).hexdigest()[:16] / file.stem
    if (folder / WEIGHTS).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # a folder appears whole, however many processes make it at once
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _fill(made, GgufHeader(file))
        (made / WEIGHTS).symlink_to(file)
        made.replace(folder)
    except OSError:
        if not (folder / WEIGHTS).exists():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _fill(folder: Path, header: GgufHeader) -> None:
    tokenizer_of(header).save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", header.config)
    # the header of a large vocabulary takes ten seconds to read
    _write(folder / INDEX, {"architecture": header.architecture, "tensors": header.index})
    _write(folder / "generation_config.json", {"eos_token_id": header.eos_token_ids})
    words = header.get("tokenizer.ggml.tokens")
    named = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    numbers = {name: header.get(f"tokenizer.ggml.{key}") for name, key in named.items()}
    _write(folder / "tokenizer_config.json", {name: words[int(n)] for name, n in numbers.items() if n is not None})
    if template := header.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))

"""The text files of a checkpoint: in a directory, or by the name of a Hugging Face Hub model in the local cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from router.regular_file import read_regular
from router.text.chat_template import compiled

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"

FILES = (TOKENIZER, "tokenizer_config.json", TEMPLATE, "chat_template.json", "special_tokens_map.json")
"""The files that define how a model reads text. Weights are never read."""

MOST_FILE_BYTES = 128 * 2**20
"""The largest known tokenizers have 35 MB."""

DOWNLOAD_S = 10.0
"""Longest wait for the Hub to answer about a name that is not in the cache."""

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?", re.ASCII)

Stamp = tuple[tuple[str, int, int], ...]
"""Name, time of the last change (ns) and size of each file."""


class NoCheckpointError(Exception):
    """The files cannot be had. The message is a sentence with the remedy in brackets."""


def directory_of(name: str) -> Path | None:
    """The directory with the files of `name`; None for a Hub name that is not in the local cache.

    Reads the disk. Raises NoCheckpointError for a directory that is missing or has no tokenizer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / TOKENIZER).is_file():
            hint = f"put {TOKENIZER} there; `transformers` writes it with `save_pretrained`"
            raise NoCheckpointError(f"{name} has no {TOKENIZER} ({hint})")
        return path
    if not is_hub_name(name):
        hint = "name a directory, relative to where the router starts, or a model of the Hugging Face Hub"
        raise NoCheckpointError(f"there is no directory {name} ({hint})")
    return _cached(name)


def is_hub_name(name: str) -> bool:
    """Whether `name` can be one of the Hugging Face Hub: `model` or `owner/model`."""
    return not name.startswith((".", "~", "/")) and _HUB_NAME.fullmatch(name) is not None


def downloaded(name: str) -> Path:
    """Download the files of the Hub's model `name` into the local cache; returns their directory. May take minutes.

    Raises NoCheckpointError if the Hub cannot be reached or has no tokenizer under that name.
    """
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=list(FILES), etag_timeout=DOWNLOAD_S))  # nosec B615
    except Exception as error:  # also exceptions of the HTTP client below
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "name a directory, or fill the cache on a machine with access to the Hub: HF_HOME, HF_HUB_CACHE"
        raise NoCheckpointError(f"{name} cannot be downloaded: {reason[:300]} ({hint})") from error
    if not (path / TOKENIZER).is_file():
        raise NoCheckpointError(f"{name} has no {TOKENIZER} on the Hub (name a directory with one)")
    return path


def read_files(directory: Path) -> Mapping[str, bytes]:
    """The text files in `directory` by name. Raises NoCheckpointError if one cannot be read."""
    found = (directory / name for name in FILES)
    return {path.name: read_file(path) for path in found if path.is_file()}


def read_file(path: Path) -> bytes:
    """The contents of `path`. Raises NoCheckpointError if it cannot be read, or is larger than any such file."""
    try:
        return read_regular(path, MOST_FILE_BYTES)
    except OSError as error:
        raise NoCheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def stamp_of(*paths: Path) -> Stamp:
    """A value that changes if one of `paths`, or a file in a directory among them, changes."""
    files = [file for path in paths for file in ([path / name for name in FILES] if path.is_dir() else [path])]
    stats = ((str(file), file.stat()) for file in files if file.is_file())
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def doubt_about(name: str) -> str | None:
    """For `pointsman check`: None if the tokenizer `name` can be read now, else a sentence: it may fail at start.

    Raises ValueError with a sentence if it will fail for certain.
    """
    try:
        if directory_of(name) is not None:
            return None
    except NoCheckpointError as error:
        raise ValueError(str(error)) from None
    return (
        f"{name} is neither a directory here nor in the local cache of Hugging Face (HF_HOME, HF_HUB_CACHE); "
        "the router tries to download it at its start"
    )


def check_template(path: str) -> None:
    """For `pointsman check`: raise ValueError with a sentence if `path` is not a chat template."""
    try:
        compiled(read_file(Path(path).expanduser()).decode())
    except (NoCheckpointError, ValueError) as error:
        raise ValueError(f"{error}" if isinstance(error, NoCheckpointError) else f"{path}: {error}") from None


def _cached(name: str) -> Path | None:
    """The snapshot of `name` in the local cache, if it has a tokenizer."""
    try:
        # part of tokenizers; imported late, because most routers never need it
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, TOKENIZER)
    return Path(found).parent if isinstance(found, str) else None

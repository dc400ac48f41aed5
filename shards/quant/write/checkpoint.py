"""Writes a checkpoint in fewer bits, tensor by tensor: no more than one file is in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shards.network.config_file import quantisation_of, read_config
from shards.network.errors import UnsupportedCheckpoint
from shards.network.families.table import family_of
from shards.network.loading import safetensors_of
from shards.quant.formats.table import format_of
from shards.quant.write.forms import FormName, WrittenForm, form_of
from shards.quant.write.matrices import HEAD, matrices_of

_FILE_BYTES = 4 * 2**30
"""A file is written when its tensors exceed this."""

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Endings of files that are not copied."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: the number of matrices, bytes before and after, and the relative errors (root mean square of a
    matrix's errors by that of its numbers): the mean over all matrices, and the largest with its matrix.
    """

    matrices: int
    bytes_before: int
    bytes_after: int
    mean_error: float
    largest_error: float
    largest_in: str


def write_quantised(folder: Path, target: Path, form: FormName, *, on_progress: OnProgress | None = None) -> Written:
    """Write the checkpoint in `folder` to `target` with its matrices in `form`, and all other tensors as they are.

    `on_progress` gets the bytes of tensors read so far, and the total. config.json is written last: a folder without it
    is incomplete. Raises CheckpointError for a checkpoint that shards do not read or that is quantised already,
    ValueError if `form` does not fit its matrices or `target` is in use.
    """
    config = read_config(folder)
    family = family_of(config.architecture)
    if quantisation_of(folder, family) is not None:
        raise UnsupportedCheckpoint(
            f"{folder} is quantised already", hint="quantise the checkpoint in floating point that it was made from"
        )
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; name a new folder")
    shapes = matrices_of(config)
    if not shapes:
        raise UnsupportedCheckpoint(f"{config.architecture} has no matrices that could be quantised")
    chosen = form_of(form, [inputs for _, inputs in shapes.values()])
    renamed = {stored: family.renamed(stored) for file in safetensors_of(folder) for stored in _names_in(file)}
    target.mkdir(parents=True, exist_ok=True)
    writer = _Writer(target, (folder / "config.json").stat().st_mode)
    errors: dict[str, float] = {}
    left: list[str] = [HEAD]
    done = before = 0
    total = sum(file.stat().st_size for file in safetensors_of(folder))
    for stored, tensor in _tensors_of(folder):
        done += tensor.nbytes
        name = renamed[stored].removesuffix(".weight")
        if name in shapes:
            tensors = chosen.tensors(tensor.float(), tensor.dtype)
            prefix = stored.removesuffix(".weight")
            writer.add({f"{prefix}.{suffix}": held for suffix, held in tensors.items()})
            errors[prefix] = _relative_error(chosen, prefix, tensors, tensor)
        else:
            writer.add({stored: tensor})
            if stored.endswith(".weight") and tensor.dim() == 2 and "embed" not in stored:
                left.append(stored.removesuffix(".weight"))
        before += tensor.nbytes
        if on_progress is not None:
            on_progress(min(done, total), total)
    writer.close()
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, target / file.name)
    written: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    written["quantization_config"] = chosen.config(sorted(set(left)))
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    if on_progress is not None:
        on_progress(total, total)
    worst = max(errors, key=errors.__getitem__)
    mean = sum(errors.values()) / len(errors)
    return Written(len(errors), before, writer.total_bytes, mean, errors[worst], worst)


class _Writer:
    """Collects tensors and writes them into files of a few GiB, with an index if there are several."""

    def __init__(self, target: Path, mode: int) -> None:
        self._target, self._mode = target, mode
        self._held: dict[str, Tensor] = {}
        self._held_bytes = self.total_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._held[name] = tensor.contiguous()
            self._held_bytes += tensor.nbytes
        if self._held_bytes >= _FILE_BYTES:
            self._flush()

    def close(self) -> None:
        if self._held:
            self._flush()
        if len(self._files) == 1:
            self._files[0][0].rename(self._target / "model.safetensors")
            return
        places: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, 1):
            final = f"model-{number:05}-of-{len(self._files):05}.safetensors"
            path.rename(self._target / final)
            places |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
        (self._target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        path = self._target / f"part-{len(self._files) + 1:05}.safetensors"
        save_file(self._held, path, {"format": "pt"})
        # safetensors lets its owner alone read it
        path.chmod(self._mode)
        self._files.append((path, list(self._held)))
        self.total_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0


class _OneMatrix:
    """The tensors of one matrix, as a format reads them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def take_stored(self, name: str, *shape: int, kinds: tuple[str, ...]) -> Tensor:  # noqa: ARG002 - just written
        return self._tensors[name].view(shape)


def _relative_error(form: WrittenForm, name: str, tensors: dict[str, Tensor], original: Tensor) -> float:
    """The root mean square error of the matrix as it will be read, by the root mean square of its numbers."""
    held = _OneMatrix({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})
    outputs, inputs = original.shape
    read = format_of(form.config([])).take(name, outputs, inputs, held).dequantised(torch.float32)
    wide = original.float()
    return float((read - wide).norm() / wide.norm().clamp_min(1e-30))


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in safetensors_of(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
                yield name, opened.get_tensor(name)

"""Compiles what the launchers would start at real shapes, for chips that are not here: one line of JSON for each.

Run in a process of its own without TRITON_INTERPRET. Tensors are on torch's meta device, so a cache of 100 GB costs
nothing; what the launchers ask for, down to which numbers are multiples of 16, is what a GPU would be given.

    python tests/shards/kernels/compile_ahead.py sm_90 --all

--all adds each way to store KV on each chip: a minute or two, mostly for gfx942.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from shards.kernels.copy_blocks import copy_blocks
from shards.kernels.gather_pages import gather_pages
from shards.kernels.kv_write import HeadNorm, Rotation, kv_write
from shards.kernels.launch import Gpu, Launch
from shards.kernels.norm import rms_norm
from shards.kernels.paged_decode import DecodePlan, paged_decode, plan_decode
from shards.kernels.paged_prefill import paged_prefill, plan_prefill
from shards.kernels.sampling import Draw, sample
from shards.kernels.silu_mul import silu_mul
from shards.kernels.targets import CHIPS, Chip

# Llama-3.1-8B
LAYERS, HEADS, KV_HEADS, DIM, WIDTH, INNER, VOCABULARY = 32, 32, 8, 128, 4096, 14336, 128256
META = torch.device("meta")
TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True)
class Recorder(Gpu):
    """A GPU that starts nothing and remembers what it was asked to."""

    launches: list[Launch] = field(default_factory=list)

    def start(self, launch: Launch) -> None:
        self.launches.append(launch)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def layer(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    kv = empty(10_000, LAYERS, 2, KV_HEADS, 64, DIM, dtype=dtype)[:, 3]
    return kv, None if dtype == torch.bfloat16 else empty(10_000, LAYERS, 2, KV_HEADS, 64, dtype=torch.float32)[:, 3]


def write(gpu: Gpu, dtype: torch.dtype) -> None:
    kv, scales = layer(dtype)
    fused = empty(64, HEADS + 2 * KV_HEADS, DIM)
    query, key, value = torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    places = (empty(64, dtype=torch.int64), empty(64, dtype=torch.int64))
    angles = empty(131072, DIM // 2, dtype=torch.float32)
    rotation = Rotation(angles, angles)
    norm = HeadNorm(empty(DIM), empty(DIM), 1e-6)
    kv_write((query, key, value), places, kv=kv, rotation=rotation, norm=norm, scales=scales, gpu=gpu)


def decode(gpu: Gpu, dtype: torch.dtype, window: int | None = None) -> None:
    kv, scales = layer(dtype)
    tables, contexts = empty(64, 2048, dtype=torch.int32), empty(64, dtype=torch.int32)
    plan = DecodePlan.with_room(64, 16384, heads=HEADS, dim=DIM, device=META, window=window)
    plan_decode(plan, contexts, gpu=gpu)
    query = empty(64, HEADS, DIM)
    paged_decode(query, kv, tables=tables, context_tokens=contexts, plan=plan, scales=scales, gpu=gpu)


def prefill(gpu: Gpu, dtype: torch.dtype, window: int | None = None) -> None:
    kv, scales = layer(dtype)
    plan = plan_prefill([8192], [131072], group=HEADS // KV_HEADS, device=META, gpu=gpu)
    query, tables = empty(8192, HEADS, DIM), empty(1, 2048, dtype=torch.int32)
    paged_prefill(query, kv, tables=tables, plan=plan, window=window, scales=scales, gpu=gpu)


def gather(gpu: Gpu, dtype: torch.dtype) -> None:
    kv, scales = layer(dtype)
    table = empty(2048, dtype=torch.int32)
    gather_pages(kv, table, tokens=131072, dtype=torch.bfloat16, scales=scales, gpu=gpu)


def draw(gpu: Gpu) -> None:
    float32, int64 = empty(64, dtype=torch.float32), empty(64, dtype=torch.int64)
    parameters = Draw(float32, empty(64, dtype=torch.int32), float32, float32, int64, int64)
    sample(empty(64, VOCABULARY), parameters, gpu=gpu)


def copy(gpu: Gpu) -> None:
    cache = empty(10_000, LAYERS, 2, KV_HEADS, 64, DIM)
    copy_blocks(cache, cache, empty(7, 2, dtype=torch.int64), gpu=gpu)


PLAIN: dict[str, Callable[[Gpu], object]] = {
    "kv_write": lambda gpu: write(gpu, torch.bfloat16),
    "decode": lambda gpu: decode(gpu, torch.bfloat16),
    "prefill": lambda gpu: prefill(gpu, torch.bfloat16),
    "gather": lambda gpu: gather(gpu, torch.bfloat16),
    "norm": lambda gpu: rms_norm(empty(64, WIDTH), empty(WIDTH), epsilon=1e-6, residual=empty(64, WIDTH), gpu=gpu),
    "silu_mul": lambda gpu: silu_mul(empty(64, 2 * INNER), gpu=gpu),
    "sample": draw,
    "copy": copy,
}
STORING: dict[str, Callable[..., object]] = {
    "kv_write": write,
    "decode": decode,
    "prefill": prefill,
    "gather": gather,
}
E4M3 = torch.float8_e4m3fn


def asked_of(chip: Chip, *, everything: bool) -> dict[str, Launch]:
    """Every launch by name. On Hopper with e4m3 and a window; with `everything` with all that the chip has."""
    work: dict[str, Callable[[Gpu], object]] = dict(PLAIN)
    hopper = chip.name == "sm_90"
    for dtype in [torch.int8] * everything + [E4M3] * (chip.has_e4m3 and (everything or hopper)):
        for name, call in STORING.items():
            work[f"{name} {TYPES[dtype]}"] = partial(call, dtype=dtype)
    if everything or hopper:
        work["decode window"] = lambda gpu: decode(gpu, torch.bfloat16, window=4096)
        work["prefill window"] = lambda gpu: prefill(gpu, torch.bfloat16, window=4096)
    launches = {}
    for name, ask in work.items():
        recorder = Recorder(chip, processors=132)
        ask(recorder)
        for launch in recorder.launches:
            _, _, variant = name.partition(" ")
            # planning does not see how KV is stored, nor merging that there is a window
            same = {"_plan": variant != "window", "_merge_splits": True}.get(launch.kernel.fn.__name__, False)
            if not (variant and same):
                launches[f"{launch.kernel.fn.__name__} {variant}".strip()] = launch
    return launches


def source_of(launch: Launch) -> ASTSource:
    """What Triton's own launcher would compile for these arguments."""
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[str, int | bool | None] = dict(launch.constants)
    attributes: dict[tuple[int], list[list[str | int]]] = {}
    for i, value in enumerate(launch.arguments):
        parameter = launch.kernel.params[i]
        is_special = not parameter.do_not_specialize
        if value is None or (isinstance(value, int) and value == 1 and is_special):
            signature[names[i]], constants[names[i]] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[names[i]] = f"*{TYPES[value.dtype]}"
        elif isinstance(value, int):
            signature[names[i]] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[names[i]] = "fp32"
        is_aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if is_aligned and is_special and not parameter.do_not_specialize_on_alignment:
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    return ASTSource(launch.kernel, {name: signature[name] for name in names}, constants, attributes)


def registers_and_spills(compiled: CompiledKernel, chip: Chip) -> tuple[int, int]:
    """Registers of a thread, and bytes (NVIDIA) or vector registers (AMD) that it has to keep in memory."""
    if chip.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills = (int(re.findall(rf"\.vgpr_{what}: *(\d+)", text)[0]) for what in ("count", "spill_count"))
        return registers, spills
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{what}:(\d+)", report)[0]) for what in ("REG", "STACK"))
    return registers, stack


def compile_for(chip: Chip, *, everything: bool) -> None:
    target = GPUTarget(chip.backend, chip.arch, chip.warp_threads)
    for name, launch in asked_of(chip, everything=everything).items():
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        compiled = triton.compile(source_of(launch), target=target, options=options)
        registers, spills = registers_and_spills(compiled, chip)
        row = {"kernel": name, "shared": compiled.metadata.shared, "registers": registers, "spills": spills}
        print(json.dumps({"chip": chip.name} | row), flush=True)


if __name__ == "__main__":
    for asked in [name for name in sys.argv[1:] if name != "--all"] or CHIPS:
        compile_for(CHIPS[asked], everything="--all" in sys.argv)

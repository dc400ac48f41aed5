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

from shards.kernels.adjust import MOST_BIASES, Adjustments
from shards.kernels.copy_blocks import copy_blocks
from shards.kernels.draw import Draw
from shards.kernels.experts import multiply_by_expert
from shards.kernels.gate import gate
from shards.kernels.gather_pages import gather_pages
from shards.kernels.kv_write import HeadNorm, Rotation, kv_write
from shards.kernels.launch import Gpu, Launch
from shards.kernels.low_rank import AdaptedRows, LowRankSlots, add_low_rank
from shards.kernels.norm import rms_norm
from shards.kernels.paged_decode import DecodePlan, SharedSplits, most_readers, paged_decode, plan_decode
from shards.kernels.paged_prefill import Tile, paged_prefill, plan_prefill, tiles_at_once
from shards.kernels.quantised import multiply_quantised
from shards.kernels.sampling import sample
from shards.kernels.targets import CHIPS, Chip
from shards.quant.matrix import QuantisedMatrix

# Llama-3.1-8B
LAYERS, WIDTH, INNER, VOCABULARY = 32, 4096, 14336, 128256
PROCESSORS = 132
META = torch.device("meta")
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True)
class Heads:
    """Attention's shape, the type of what is computed, and how KV is `stored` where that is another."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype | None = None
    window: int | None = None
    has_sinks: bool = False

    def sinks(self) -> torch.Tensor | None:
        """A score per head, as in gpt-oss."""
        return empty(self.heads, dtype=self.dtype) if self.has_sinks else None

    def layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer of a cache of 10,000 blocks, and its scales."""
        shape = (10_000, LAYERS, 2, self.kv_heads, 64)
        kv = empty(*shape, self.dim, dtype=self.stored or self.dtype)[:, 3]
        return kv, None if self.stored is None else empty(*shape, dtype=torch.float32)[:, 3]


@dataclass(frozen=True)
class Recorder(Gpu):
    """A GPU that starts nothing and remembers what it was asked to."""

    launches: list[Launch] = field(default_factory=list)

    def start(self, launch: Launch) -> None:
        self.launches.append(launch)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def write(gpu: Gpu, of: Heads) -> None:
    kv, scales = of.layer()
    fused = empty(64, of.heads + 2 * of.kv_heads, of.dim, dtype=of.dtype)
    query, key, value = torch.split(fused, [of.heads, of.kv_heads, of.kv_heads], dim=1)
    places = (empty(64, dtype=torch.int32), empty(64, dtype=torch.int32))
    angles = empty(131072, of.dim // 2, dtype=torch.float32)
    norm = HeadNorm(empty(of.dim), empty(of.dim), 1e-6)
    kv_write((query, key, value), places, kv=kv, rotation=Rotation(angles, angles), norm=norm, scales=scales, gpu=gpu)


def decode(gpu: Gpu, of: Heads) -> None:
    kv, scales = of.layer()
    tables, contexts = empty(64, 2048, dtype=torch.int32), empty(64, dtype=torch.int32)
    # as in a step: what is shared is always given, except to layers with a window
    readers = 1 if of.window else most_readers(of.heads // of.kv_heads)
    room = {"heads": of.heads, "dim": of.dim, "device": META, "window": of.window, "readers": readers}
    plan = DecodePlan.with_room(64, 16384, **room)
    shared = SharedSplits(empty(64, 4, dtype=torch.int32), contexts, contexts)
    plan_decode(plan, contexts, shared=None if of.window else shared, gpu=gpu)
    query = empty(64, of.heads, of.dim, dtype=of.dtype)
    more = {"scales": scales, "sinks": of.sinks(), "gpu": gpu}
    paged_decode(query, kv, tables=tables, context_tokens=contexts, plan=plan, **more)


def prefill(gpu: Gpu, of: Heads) -> None:
    kv, scales = of.layer()
    tile = Tile.of(gpu, group=of.heads // of.kv_heads, dim=of.dim, dtype=of.dtype)
    tables = empty(1, 2048, dtype=torch.int32)
    more = {"window": of.window, "scales": scales, "sinks": of.sinks(), "gpu": gpu}
    # the context of a short chunk is cut
    for new in (8192, 64):
        at_once = tiles_at_once(gpu, kv_heads=of.kv_heads)
        plan = plan_prefill([new], [131072], tile=tile, device=META, at_once=at_once)
        paged_prefill(empty(new, of.heads, of.dim, dtype=of.dtype), kv, tables=tables, plan=plan, **more)


def gather(gpu: Gpu, of: Heads) -> None:
    kv, scales = of.layer()
    table = empty(2048, dtype=torch.int32)
    gather_pages(kv, table, tokens=131072, dtype=of.dtype, scales=scales, gpu=gpu)


def draw(gpu: Gpu) -> None:
    float32, int64, int32 = (empty(64, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.int32))
    adjustments = Adjustments(
        rows=empty(64, 3, dtype=torch.int32),
        penalties=empty(64, 3, dtype=torch.float32),
        entries=empty(64, VOCABULARY, dtype=torch.int32),
        biases=empty(64, MOST_BIASES + 1, dtype=torch.float32),
        masks=empty(64, VOCABULARY // 32, dtype=torch.int32),
    )
    parameters = Draw(float32, int32, float32, float32, int64, int64, int32, adjustments)
    sample(empty(64, VOCABULARY), parameters, pool=int32, target=int64, gpu=gpu)


def copy(gpu: Gpu) -> None:
    cache = empty(10_000, LAYERS, 2, 8, 64, 128)
    copy_blocks(cache, cache, empty(7, 2, dtype=torch.int64), gpu=gpu)


def mix(gpu: Gpu, tokens: int, *, stored: torch.dtype = torch.bfloat16) -> None:
    # Qwen3-30B-A3B
    pairs, int32 = 8 * tokens, torch.int32
    numbers = {"sources": empty(pairs, dtype=int32), "targets": empty(pairs, dtype=int32)}
    more = numbers | {"shares": empty(pairs, dtype=torch.float32), "bounds": empty(129, dtype=int32)}
    is_packed = stored != torch.bfloat16
    matrices = quantised(128 * 1536, 2048, stored, group=128) if is_packed else empty(128, 1536, 2048)
    if gpu.chip.has_e4m3 or stored != torch.float8_e4m3fn:
        multiply_by_expert(empty(tokens, 2048), matrices, experts=128, pairs=pairs, **more, gpu=gpu)


def quantised(
    outputs: int, inputs: int, stored: torch.dtype, *, group: int, has_zeros: bool = False
) -> QuantisedMatrix:
    groups = (outputs, inputs // group)
    zeros = empty(*groups, dtype=torch.int16) if has_zeros else None
    numbers = empty(outputs, inputs // (2 if stored == torch.uint8 else 1), dtype=stored)
    return QuantisedMatrix(numbers, empty(*groups), group, zeros)


def multiply(gpu: Gpu, rows: int, stored: torch.dtype, group: int, *, has_zeros: bool = False) -> None:
    if gpu.chip.has_e4m3 or stored != torch.float8_e4m3fn:
        matrix = quantised(INNER, WIDTH, stored, group=group, has_zeros=has_zeros)
        multiply_quantised(empty(rows, WIDTH), matrix, gpu=gpu)


def adapt(gpu: Gpu, rows: int, *, tile: int, rank: int = 16) -> None:
    # queries, keys and values, with eight slots
    outputs, parts, int32 = 6144, 3, torch.int32
    tiles = AdaptedRows(empty(rows, dtype=int32), empty(rows // tile + 8, 3, dtype=int32), tile)
    matrices = empty(8, parts, rank, WIDTH), empty(8, outputs, rank)
    slots = LowRankSlots(*matrices, empty(8, parts, dtype=int32), empty(parts + 1, dtype=int32), WIDTH)
    add_low_rank(empty(rows, outputs), empty(rows, WIDTH), slots, tiles, gpu=gpu)


ROWS: dict[str, Callable[[Gpu], object]] = {
    "norm": lambda gpu: rms_norm(empty(64, WIDTH), empty(WIDTH), epsilon=1e-6, residual=empty(64, WIDTH), gpu=gpu),
    "gate": lambda gpu: gate(empty(64, 2 * INNER), gpu=gpu),
    "gate gelu_tanh": lambda gpu: gate(empty(64, 2 * INNER), "gelu_tanh", gpu=gpu),
    "gate clamped_swiglu": lambda gpu: gate(empty(64, 2 * INNER), "clamped_swiglu", gpu=gpu),
    "sample": draw,
    "copy": copy,
    "experts, few": partial(mix, tokens=4),
    "experts, many": partial(mix, tokens=2048),
    "experts, many, fp8": partial(mix, tokens=2048, stored=torch.float8_e4m3fn),
    "adapters, few": partial(adapt, rows=64, tile=16),
    "adapters, many, rank 64": partial(adapt, rows=2048, tile=64, rank=64),
    "rows 8 fp8 by row": partial(multiply, rows=8, stored=torch.float8_e4m3fn, group=WIDTH),
    "rows 2048 int4 with zeros": partial(multiply, rows=2048, stored=torch.uint8, group=128, has_zeros=True),
}

# Compiled with --all alone.
MORE_ROWS: dict[str, Callable[[Gpu], object]] = {
    "experts, few, fp8": partial(mix, tokens=4, stored=torch.float8_e4m3fn),
    "experts, many, int4": partial(mix, tokens=2048, stored=torch.uint8),
    **{
        f"rows {rows} {name}": partial(multiply, rows=rows, stored=stored, group=group, has_zeros=has_zeros)
        for rows in (8, 2048)
        for name, stored, group, has_zeros in (
            ("fp8 by row", torch.float8_e4m3fn, WIDTH, False),
            ("fp8 in blocks", torch.float8_e4m3fn, 128, False),
            ("int8 by row", torch.int8, WIDTH, False),
            ("int4", torch.uint8, 128, False),
            ("int4 with zeros", torch.uint8, 128, True),
        )
    },
}
ATTENTION: tuple[Callable[[Gpu, Heads], None], ...] = (write, decode, prefill, gather)

# What goes by other names for others: the shapes of Qwen2's smallest, of wide heads, and of what tests compute in.
SHAPES = {
    "": Heads(),
    "e4m3": Heads(stored=torch.float8_e4m3fn),
    "window": Heads(window=4096),
    "14/2 heads of 64": Heads(14, 2, 64),
    "16/8 heads of 256": Heads(16, 8, 256),
    "sinks and a window": Heads(64, 8, 64, window=128, has_sinks=True),
    "float32": Heads(dtype=torch.float32),
    "int8": Heads(stored=torch.int8),
    "float16": Heads(dtype=torch.float16),
    "int8, 16/8 heads of 256": Heads(16, 8, 256, stored=torch.int8),
}
# Everything on an H200, and on those with less memory what needs most of it; AMD's compiler takes its time.
USUAL = {
    "sm_80": ("",),
    "sm_86": ("",),
    "sm_89": ("", "e4m3", "16/8 heads of 256"),
    "sm_90": ("", "e4m3", "window", "14/2 heads of 64", "16/8 heads of 256", "sinks and a window", "float32"),
    "sm_100": ("",),
    "sm_120": ("",),
    "gfx942": ("",),
}


def asked_of(chip: Chip, *, everything: bool) -> dict[str, Launch]:
    """Every launch by name, in the usual shapes; with `everything` in all that the chip has."""
    wholly = everything or chip.name in ("sm_90", "gfx942")
    work: dict[str, Callable[[Gpu], object]] = dict(ROWS) if wholly else {}
    work |= MORE_ROWS if everything else {}
    for name, shape in SHAPES.items():
        stores = wholly and (not name or shape.stored is not None)
        if (everything or name in USUAL[chip.name]) and (chip.has_e4m3 or shape.stored != torch.float8_e4m3fn):
            work |= {
                f"{call.__name__} {name}".strip(): partial(call, of=shape)
                for call in (ATTENTION if everything or stores else (decode, prefill))
            }
    launches = {}
    for name, ask in work.items():
        recorder = Recorder(chip, processors=PROCESSORS)
        ask(recorder)
        for launch in recorder.launches:
            _, _, variant = name.partition(" ")
            kernel = launch.kernel.fn.__name__
            # planning sees windows and the size of groups, merging the size of heads: nothing else of a shape
            of_heads = "heads of" not in variant
            is_planned_alike = "window" not in variant and of_heads
            same = {"_plan": is_planned_alike, "_merge_splits": of_heads, "_merge_parts": of_heads}
            if not (variant and same.get(kernel, False)):
                in_parts = " in parts" if launch.constants.get("CUT") else ""
                stage = f" {launch.constants['STAGE']}" if "STAGE" in launch.constants else ""
                launches[f"{kernel}{in_parts}{stage} {variant}".strip()] = launch
    return launches


def source_of(launch: Launch) -> ASTSource:
    """The kernel that Triton's own launcher would compile for these arguments."""
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[str, int | float | bool | str | None] = dict(launch.constants)
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


def resident_programs(chip: Chip, *, shared: int, registers: int, warps: int) -> int:
    """The programs of a kernel that one NVIDIA multiprocessor runs at a time.

    Source: CUDA C++ programming guide, technical specifications: 64 Ki registers, given to a warp in steps of 256; of
    the shared memory 1 KiB goes to the system for each program.
    """
    by_registers = 65536 // (warps * -(-registers * chip.warp_threads // 256) * 256)
    by_shared = (chip.shared_bytes + 1024) // (shared + 1024)
    return min(by_registers, by_shared)


def matrix_unit(compiled: CompiledKernel) -> str | None:
    """Which of NVIDIA's matrix instructions a kernel uses: wgmma, which is Hopper's, tcgen05, Blackwell's, or mma."""
    used = re.search(r"\b(wgmma|tcgen05|mma)(?:\.mma_async|\.mma|\.sync)", compiled.asm.get("ptx", ""))
    return used[1] if used else None


def compile_for(chip: Chip, *, everything: bool) -> None:
    target = GPUTarget(chip.backend, chip.arch, chip.warp_threads)
    for name, launch in asked_of(chip, everything=everything).items():
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        compiled = triton.compile(source_of(launch), target=target, options=options)
        registers, spills = registers_and_spills(compiled, chip)
        row = {"kernel": name, "shared": compiled.metadata.shared, "registers": registers, "spills": spills}
        row["matrix"] = matrix_unit(compiled)
        if name.startswith("_attend_to_splits") and chip.backend == "cuda":
            # its programs share all work evenly, so one that has to wait for another doubles the time
            row["beside"] = launch.grid[0] // PROCESSORS
            row["resident"] = resident_programs(
                chip, shared=compiled.metadata.shared, registers=registers, warps=launch.warps
            )
        print(json.dumps({"chip": chip.name} | row), flush=True)


if __name__ == "__main__":
    for asked in [name for name in sys.argv[1:] if name != "--all"] or CHIPS:
        compile_for(CHIPS[asked], everything="--all" in sys.argv)

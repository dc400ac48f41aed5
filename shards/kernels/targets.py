"""The limits of chips, by which kernels are sized and checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """The limits of one kind of GPU. `backend`, `arch` and `warp_threads` are Triton's names for it.

    `shared_bytes` is the most that one program may use; `registers` the most that one thread may use (vector registers
    on AMD, including accumulators). `has_e4m3`: it converts float8_e4m3fn in hardware.
    """

    name: str
    backend: str
    arch: int | str
    warp_threads: int
    shared_bytes: int
    registers: int
    has_e4m3: bool

    def fits(self, tile_bytes: int, most: int) -> int:
        """The number of tiles of this size that fit at the same time, at least 1 and at most `most`.

        An eighth is left for layout changes and reductions.
        """
        return max(1, min(most, self.shared_bytes * 7 // 8 // tile_bytes))


# Sources: CUDA C++ programming guide, "technical specifications per compute capability" (a block may use 1 KiB less
# than the processor has); AMD CDNA 3 ISA reference: 64 KiB of local data share, 512 vector registers with accumulators,
# and an 8-bit type of its own (fnuz) in place of e4m3.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", "cuda", 80, warp_threads=32, shared_bytes=163 * 1024, registers=255, has_e4m3=False),
        Chip("sm_86", "cuda", 86, warp_threads=32, shared_bytes=99 * 1024, registers=255, has_e4m3=False),
        Chip("sm_89", "cuda", 89, warp_threads=32, shared_bytes=99 * 1024, registers=255, has_e4m3=True),
        Chip("sm_90", "cuda", 90, warp_threads=32, shared_bytes=227 * 1024, registers=255, has_e4m3=True),
        Chip("sm_100", "cuda", 100, warp_threads=32, shared_bytes=227 * 1024, registers=255, has_e4m3=True),
        Chip("sm_120", "cuda", 120, warp_threads=32, shared_bytes=99 * 1024, registers=255, has_e4m3=True),
        Chip("gfx942", "hip", "gfx942", warp_threads=64, shared_bytes=64 * 1024, registers=512, has_e4m3=False),
    )
}

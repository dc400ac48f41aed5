"""Settings of the C library's allocator for the process of a router."""

from __future__ import annotations

import ctypes

KEPT_BYTES = 32 * 2**20
"""Freed memory at the end of the heap that stays with the process."""

MAPPED_FROM_BYTES = 4 * 2**20
"""Objects from this size on are mapped by themselves, and given back as soon as they are freed."""

# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Have freed memory kept for the next request; False where the C library has no such settings (musl, macOS).

    A prompt of a megabyte is a few objects of that size. By default glibc gives each of them back to the system, which
    maps and clears its pages anew for the next prompt: a tenth of the CPU that such a request takes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES))

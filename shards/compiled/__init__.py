"""Loops that numba compiles for the CPU, where torch's operators cost more than the work.

Imported only by networks that are large enough (`LEAST_WIDTH`) or in few bits, because numba takes half a second to
load and, once per machine, some seconds to compile. Compiled code is kept in numba's cache.
"""

LEAST_WIDTH = 512
"""Numbers of a row from which on its network is worth compiling for."""

LEAST_KV_WIDTH = 256
"""Numbers of a position's keys from which on its attention is worth compiling for."""

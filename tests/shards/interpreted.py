"""Which of the tests in Triton's interpreter run beside all others: the interpreter takes minutes for all of them."""

from __future__ import annotations

import platform
import sys

HAS_MAKE_KERNELS = (sys.platform, platform.machine()) == ("linux", "x86_64")

# each test with its first parameters where `make kernels` runs it with all of them; limits are for hangs alone
OPTIONS = ["--timeout", "300", *(["--one-of-each"] if HAS_MAKE_KERNELS else [])]

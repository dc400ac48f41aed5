"""`python -m tests.late_gpu [ARGUMENTS OF PYTEST]`: tests that need a GPU, on the stand-in."""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "tests.late_gpu.plugin", *sys.argv[1:]]))

"""`python -m tests.late_gpu [ARGUMENTS OF PYTEST]`: tests that need a GPU, on the stand-in."""

from __future__ import annotations

import sys

import pytest

from tests.late_gpu.session import a_late_gpu

if __name__ == "__main__":
    with a_late_gpu():
        code = pytest.main(sys.argv[1:])
    sys.exit(code)

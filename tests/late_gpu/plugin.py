"""A plugin of pytest: the stand-in is there before any test file is read, in each worker of pytest-xdist too."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.late_gpu.session import a_late_gpu


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    stack = ExitStack()
    stack.enter_context(a_late_gpu())
    early_config.add_cleanup(stack.close)

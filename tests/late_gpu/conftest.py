"""Tests on the stand-in run under `python -m tests.late_gpu` alone (`make kernels`)."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("ttsem") is None:
    collect_ignore = ["test_rules.py", "test_transfers.py"]

"""Dense attention of torch in tests: in float32 on the CPU, and in two bytes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def skipped_where_dense_attention_has_no_float32() -> Iterator[None]:
    """Skip the test at torch's refusal; `shards.gpu.dense` takes the paged kernel then."""
    try:
        yield
    except RuntimeError as error:
        if "only support fp16 and bf16" not in str(error):
            raise
        pytest.skip(f"torch on a GPU: {error}")

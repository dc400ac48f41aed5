"""The table of formats: from quantization_config in a config.json to the format of its matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shards.network.errors import UnsupportedCheckpoint
from shards.quant.formats import awq, compressed_tensors, fp8, gptq
from shards.quant.formats.base import WeightFormat
from shards.quant.formats.fields import HINT

_READERS: dict[str, Callable[[dict[str, Any]], WeightFormat]] = {
    method: module.read for module in (fp8, compressed_tensors, awq, gptq) for method in module.METHODS
}

METHODS = tuple(_READERS)
"""The values of quant_method that are read."""


def format_of(given: dict[str, Any]) -> WeightFormat:
    """The format that quantization_config describes. Raises UnsupportedCheckpoint or BrokenCheckpoint."""
    method = given.get("quant_method", "unknown")
    if method not in _READERS:
        raise UnsupportedCheckpoint(
            f"the weights are quantized ({method}); a shard reads floating point, {', '.join(METHODS)}", hint=HINT
        )
    return _READERS[method](given)

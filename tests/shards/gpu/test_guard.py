from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shards.exec.batch import Row
from shards.exec.drawing import GREEDY
from shards.gpu.guard import require_step
from shards.gpu.spans import Span, Step, step_of_spans
from shards.network.config import NetworkConfig, Rope

CONFIG = NetworkConfig("LlamaForCausalLM", 97, 32, 48, 4, 2, 8, 128, 1e-6, Rope(), (None,))
BLOCKS, ROWS = 10, 4


def a_step() -> Step:
    return step_of_spans([Span(3, None, 127, [2, 9], GREEDY), Span(1, [5, 96], 0, [10], GREEDY)])


def require(step: Step) -> None:
    require_step(step, CONFIG, blocks=BLOCKS, rows=ROWS)


def test_what_fits_exactly_is_let_through() -> None:
    require(a_step())


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"known": np.array([0, 5, 97])}, "a token is 97, and there are 97"),
        ({"known": np.array([0, -1, 6])}, "a token is -1"),
        ({"positions": np.array([128, 0, 1])}, "a position is 128, and there are 128"),
        ({"slots": np.array([11 * 64, 0, 1])}, "a slot is 704, and there are 704"),
        ({"wanted": np.array([0, 3])}, "a token that is wanted is 3"),
        ({"targets": np.array([3, 5])}, "a row that remembers is 5, and there are 5"),
        ({"ahead": ((0, 4),)}, "token 0 of 3 refers to row 4 of 4"),
        ({"ahead": ((3, 0),)}, "token 3 of 3 refers to row"),
        ({"rows": (Row(0, 1, 129, (2, 9)),)}, "a context of 129 tokens does not fit into 2 blocks"),
    ],
)
def test_what_lies_beyond_is_refused_before_a_kernel_meets_it(changes: dict[str, object], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        require(replace(a_step(), **changes))  # type: ignore[arg-type]


def test_a_step_of_nothing_but_padding_asks_for_nothing() -> None:
    require(replace(a_step(), wanted=np.array([], dtype=np.int64), targets=np.array([], dtype=np.int64)))

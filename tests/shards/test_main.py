"""What the command line makes of its options."""

from __future__ import annotations

import pytest

from shards.__main__ import pool_options
from shards.engine import EngineOptions
from shards.exec.fake import FakeNetwork
from shards.kv.table import blocks_for
from shards.model import Model
from tests.shards.driver import EOS, a_tokenizer


def test_a_quarter_of_the_pool_may_be_pinned_unless_a_long_prompt_needs_it_or_the_operator_says() -> None:
    model = Model("m", FakeNetwork(), a_tokenizer(), frozenset({EOS}))
    context_blocks = blocks_for(model.network.context_tokens)
    large, small = EngineOptions(kv_blocks=10 * context_blocks), EngineOptions(kv_blocks=context_blocks)
    assert pool_options(model, None, large).pin_share == 0.25
    assert pool_options(model, None, small).pin_share == 0.0
    assert pool_options(model, 0.5, small).pin_share == 0.5
    with pytest.raises(ValueError, match="hold no KV block"):
        pool_options(model, None, EngineOptions(kv_bytes=1))

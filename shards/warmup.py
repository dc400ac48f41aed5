"""Small requests before the first real one: they detect a broken model, and train the cost model."""

from __future__ import annotations

import numpy as np

from shards.engine import Engine
from shards.exec.network import DrawingNetwork
from shards.nouns import Finished, FinishReason, SamplingParams, Submission
from shards.sched.warm_up import NEW_TOKENS, warm_up_prompts

_DOMAIN = "\x00warm-up"
"""A cache domain that no tenant has, so that only its own blocks are cleared afterwards, and none on disk."""


class BrokenModel(Exception):
    """The model was loaded but cannot answer."""


def warm_up(engine: Engine) -> None:
    """Run some prompts of ordinary lengths through an idle `engine`, and leave its cache empty, as it was before.

    The first forward pass of a process takes several times as long as the second, and a device compiles for every batch
    size; no client should wait for that. Raises BrokenModel if an answer fails.
    """
    network, options = engine.model.network, engine.options
    if isinstance(network, DrawingNetwork) and not options.deterministic:
        network.prepare(options.max_running, options.drawn_rows(network.most_rows))
    for number, tokens in enumerate(warm_up_prompts(engine.model.network.context_tokens)):
        ids = np.arange(number, number + tokens, dtype="<u4") % engine.model.vocabulary
        key = ("warm-up", number)
        sampling = SamplingParams(ignore_eos=True)
        engine.submit(Submission(key, tokens, NEW_TOKENS, domain=_DOMAIN, sampling=sampling))
        engine.extend(key, ids.astype("<u4").tobytes())
        finished: list[Finished] = []
        while not finished:
            finished += engine.step().finished
        if finished[0].reason is not FinishReason.LENGTH:
            raise BrokenModel(f"{engine.model.name} cannot answer: {finished[0].message}")
    engine.clear_cache(_DOMAIN)
    engine.step()

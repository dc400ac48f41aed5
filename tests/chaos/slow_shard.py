"""Our own shard with the prefill of a much larger model, which keeps a list of the requests that it began.

`python -m tests.chaos.slow_shard` takes the options of `python -m shards`. CHAOS_PREFILL_S: seconds for each token of a
prompt behind the first 512. CHAOS_STARTED: the file that gets the seed of each request, one a line.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

import shards.__main__ as program
from shards.engine import Engine
from shards.exec.batch import Batch
from shards.exec.network import Network
from shards.model import Model
from shards.nouns import Submission

FAST_TOKENS = 512


def slow_down(network: Network, s_per_token: float) -> None:
    """Have `network` take `s_per_token` seconds more for each token of a prompt behind the first FAST_TOKENS."""
    compute = network.forward

    def forward(batch: Batch) -> Tensor:
        logits = compute(batch)
        of_prompts = sum(
            max(0, row.context_tokens - max(FAST_TOKENS, row.context_tokens - row.tokens))
            for row in batch.rows
            if row.tokens > 1
        )
        time.sleep(of_prompts * s_per_token)
        return logits

    # protocols look for methods of the network's class, which stays what it is
    network.forward = forward  # type: ignore[method-assign]


def main() -> None:
    """Run the shard."""
    load, submit, s_per_token = program.load_model, Engine.submit, float(os.environ["CHAOS_PREFILL_S"])

    def load_slow(*arguments: Any, **options: Any) -> Model:
        model = load(*arguments, **options)
        slow_down(model.network, s_per_token)
        return model

    program.load_model = load_slow
    with Path(os.environ["CHAOS_STARTED"]).open("a", buffering=1) as started:

        def noted(self: Engine, submission: Submission) -> None:
            print(submission.sampling.seed, file=started)
            submit(self, submission)

        Engine.submit = noted  # type: ignore[method-assign]
        program.app(prog_name="pointsman shard")


if __name__ == "__main__":
    main()

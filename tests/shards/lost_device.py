"""`python -m tests.shards.lost_device`: a shard with a device that fails for good at two tokens 251 in a row."""

from __future__ import annotations

import gc
import sys

import torch

from shards import __main__ as shard
from shards.exec.batch import Batch
from shards.exec.fake import FakeNetwork
from shards.model import Model


class LosesItsDevice(FakeNetwork):
    """As a GPU after an illegal access: every later step fails, and so does the question whether it answers."""

    is_lost = False

    def forward(self, batch: Batch) -> torch.Tensor:
        ids = batch.token_ids
        self.is_lost = self.is_lost or bool(((ids[1:] == 251) & (ids[:-1] == 251)).any())
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().forward(batch)

    def device_answers(self) -> bool:
        print(f"{gc.get_freeze_count()} objects are spared by the collector", file=sys.stderr)
        return not self.is_lost


def load_model(*_: object, **__: object) -> Model:
    return Model("m", LosesItsDevice())


if __name__ == "__main__":
    shard.load_model = load_model
    shard.app()

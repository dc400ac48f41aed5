"""A process of a shard, but not the first: `python -m shards.parallel JOB`, started by `shards.parallel.processes`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import cast

import msgspec

from shards.lifeline import end_with_stdin
from shards.logs import AS_JSON, log_to_stderr, tell
from shards.parallel.job import PartJob
from shards.parallel.link import PartLink
from shards.threads import use_threads


def main(job: PartJob) -> None:
    """Load the part of `job`, and obey until the first process ends the link."""
    from shards.model import Model
    from shards.parallel.collectives import WAITS_S, Collectives, join
    from shards.parallel.follower import Follower
    from shards.parallel.leader import PartNetwork
    from shards.parallel.orders import Answer

    use_threads(job.threads)
    link = PartLink(socket.socket(fileno=job.link), waits_s=WAITS_S)
    store = join(job.port, job.size)
    link.send(msgspec.msgpack.encode(Answer()))
    group = Collectives.on(job.device, store, job.rank, job.size)
    try:
        model = Model.load(
            job.folder,
            dtype=job.dtype,
            kv_dtype=job.kv_dtype,
            device=job.device,
            group=group,
            whole_experts=job.whole_experts,
        )
    except (ValueError, OSError, MemoryError) as error:
        link.send(msgspec.msgpack.encode(Answer(error=f"part {job.rank} cannot be loaded: {error}")))
        return
    assert model.files is not None, "it was loaded from files"
    link.send(msgspec.msgpack.encode(Answer(model.files.number)))
    Follower(cast("PartNetwork", model.network), link).run()


if __name__ == "__main__":
    end_with_stdin()
    log_to_stderr(as_json=AS_JSON in os.environ)
    asked = msgspec.json.decode(sys.argv[1], type=PartJob)
    try:
        main(asked)
    except Exception as error:  # noqa: BLE001 - the supervisor: any exception ends this process, and so the shard
        tell(f"part {asked.rank} of {asked.size} failed: {type(error).__name__}: {error}", logging.ERROR)
        sys.exit(1)

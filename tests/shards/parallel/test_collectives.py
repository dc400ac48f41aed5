"""The processes of a shard meet on this machine alone."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from shards.parallel.collectives import Collectives, join, meeting_point

LISTENS = "0A"
"""In Linux' include/net/tcp_states.h, and so in /proc/net/tcp."""


def listening_at() -> set[str]:
    """The addresses, in hexadecimal digits, at which this process listens."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and row[9] in own}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="/proc/net tells what a process listens at")
def test_no_other_machine_reaches_the_meeting_point_or_the_group() -> None:
    before = listening_at()
    store = meeting_point(2)
    found: list[Collectives] = []

    def follow() -> None:
        found.append(Collectives.gloo(join(store.port, 2), 1, 2))

    thread = threading.Thread(target=follow)
    thread.start()
    found.append(Collectives.gloo(store, 0, 2))
    thread.join()
    at = listening_at() - before
    assert at, "the store listens"
    # 127.0.0.1 in the byte order of this machine's /proc, and of IPv6 nothing
    assert at <= {"0100007F", "7F000001"}
    assert len(found) == 2

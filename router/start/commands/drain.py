"""`pointsman drain`: backends get no new requests, or get them again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

from backends.nesting import decode_json
from router.operate.admin_port import AdminPort

_LOOK_EVERY_S = 0.5


def drain(port: AdminPort, backends: Sequence[str], *, draining: bool) -> None:
    """Have `backends` drained, or in use again; prints a line for each. Raises ExpectedError."""
    body = json.dumps({"draining": draining}).encode()
    for name in backends:
        port.call(f"/admin/backends/{quote(name, safe='')}", "PATCH", body=body)
        print(f"{name} {'gets no new requests' if draining else 'is in use again'}")  # noqa: T201


def wait(port: AdminPort, backends: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when no request of the router runs at `backends` any more; prints how many run as that changes."""
    shown = -1
    while (running := _running(port, backends)) != 0:
        if running != shown:
            print(f"{running:,} requests are still running")  # noqa: T201
        shown = running
        sleep(_LOOK_EVERY_S)
    print("no request is running there")  # noqa: T201


def _running(port: AdminPort, backends: Sequence[str]) -> int:
    """The requests of this router that run at `backends`, with those of all ranks of a server."""
    rows = decode_json(port.call("/admin/snapshot"))["backends"]
    servers = {row["server"] for row in rows if row["name"] in backends}
    return sum(row["in_flight"] for row in rows if row["name"] in backends or row["server"] in servers)

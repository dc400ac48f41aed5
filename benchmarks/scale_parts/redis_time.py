"""The CPU time, traffic and commands of a Redis, as it counts them itself."""

from __future__ import annotations

from collections.abc import Mapping

from tests.router.shared.store.parts import RedisServer


class RedisTime:
    """What `server` counted since the last call: seconds of CPU, bytes in and out, entries written and reads."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._before: Mapping[str, float] = {}

    def since(self) -> dict[str, float]:
        with self._server.admin() as admin:
            counted, calls = admin.info(), admin.info("commandstats")
        now = {
            "cpu": counted["used_cpu_user"] + counted["used_cpu_sys"],  # type: ignore[index]
            "in": float(counted["total_net_input_bytes"]),  # type: ignore[index]
            "out": float(counted["total_net_output_bytes"]),  # type: ignore[index]
            "written": _calls(calls, "xadd"),
            "reads": _calls(calls, "xread"),
        }
        grown = {name: number - self._before.get(name, 0.0) for name, number in now.items()}
        self._before = now
        return grown


def _calls(stats: object, command: str) -> float:
    assert isinstance(stats, Mapping)
    return float(stats.get(f"cmdstat_{command}", {}).get("calls", 0))

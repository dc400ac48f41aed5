"""Routers as programs in front of engines that speak vLLM's HTTP: how each is started."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.engines.programs import ROOT, Program, an_envoy, free_ports, program
from tests.engines.routed import KEY


class Engine(Protocol):
    """One engine: its port on loopback, and the addresses of its cache events and of their replay, if it has them."""

    @property
    def port(self) -> int: ...

    @property
    def url(self) -> str: ...

    @property
    def events(self) -> str | None: ...

    @property
    def replay(self) -> str | None: ...


@dataclass(frozen=True)
class Setting:
    """What routers are put in front of: `engines` that serve `model`. Files go to `folder`.

    `sla` is Pointsman's file, with places for `{pool}`, `{key}`, `{servers}`, `{policy}` and `{more}`; `pool` are
    further keys of its pool. `programs` are folders with programs of others, beside that of `make engines`.
    """

    folder: Path
    engines: Sequence[Engine]
    model: str
    sla: str
    pool: Mapping[str, Any] = field(default_factory=dict)
    programs: Sequence[Path] = ()


Running = AbstractAsyncContextManager[list[str]]
"""A running router: URLs for its clients."""


@contextmanager
def running(*programs: Program) -> Iterator[None]:
    """The programs are ready, and end afterwards."""
    with ExitStack() as stack:
        for each in programs:
            stack.callback(each.stop)
            each.start()
        for each in programs:
            each.wait_until_ready(60)
        yield


def a_pointsman(
    name: str,
    setting: Setting,
    *,
    policy: str = "default",
    events: bool = True,
    more: str = "",
    picker: int | None = None,
) -> tuple[Program, str]:
    """Pointsman, not started, and its URL. `more` is the end of its file; `picker` a port for gateways."""
    (port,) = free_ports(1)
    engines = setting.engines
    pool: dict[str, Any] = {"kind": "vllm", "at": [each.url for each in engines], "model": setting.model}
    at = {"events": [each.events for each in engines], "replay": [each.replay for each in engines]}
    pool |= setting.pool
    pool["options"] = {**pool.get("options", {}), **(at if events else {"events": "none"})}
    # benchmarks read there whether cache events arrive
    servers: dict[str, Any] = {"http": f"127.0.0.1:{port}", "grpc": "off", "metrics": "open", "state": "off"}
    if picker is not None:
        servers["picker"] = f"127.0.0.1:{picker}"
    key = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    file = setting.folder / f"{name}.yaml"
    parts = {"key": key, "pool": json.dumps(pool), "servers": json.dumps(servers), "policy": policy, "more": more}
    file.write_text(setting.sla.format(**parts), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    command = (sys.executable, "-c", "from router.start.cli import main; main()", "serve", str(file))
    return Program(name, command, setting.folder, f"{url}/readyz", environment={"PYTHONPATH": str(ROOT)}), url


@asynccontextmanager
async def pointsman(setting: Setting, *, policy: str = "default", events: bool = True) -> AsyncIterator[list[str]]:
    """One Pointsman."""
    router, url = a_pointsman("pointsman", setting, policy=policy, events=events)
    with running(router):
        yield [url]


@asynccontextmanager
async def envoy_with_picker(setting: Setting) -> AsyncIterator[list[str]]:
    """Envoy, which asks Pointsman where requests go: the file of `examples/gateway` with these engines."""
    picker, port = free_ports(2)
    router, _ = a_pointsman("picker", setting, picker=picker)
    config = (ROOT / "examples/gateway/envoy.yaml").read_text()
    endpoint = "- endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}"
    indent = "\n" + " " * 14
    listed = indent.join(endpoint.format(each.port) for each in setting.engines)
    examples = indent.join(endpoint.format(port) for port in (8101, 8102))
    assert examples in config, "the example's engines have changed"
    config = config.replace(examples, listed)
    for theirs, ours in {8000: port, 9002: picker}.items():
        config = config.replace(f"port_value: {theirs}}}", f"port_value: {ours}}}")
    with running(router, an_envoy("envoy", setting.folder, config)):
        yield [f"http://127.0.0.1:{port}"]


@asynccontextmanager
async def of_others(setting: Setting, name: str, *words: str) -> AsyncIterator[list[str]]:
    """A router with the options of SGLang's: `words` come first, then its engines and ports."""
    port, metrics = free_ports(2)
    urls = [each.url for each in setting.engines]
    found = next((str(folder / name) for folder in setting.programs if (folder / name).exists()), program(name))
    flags = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--worker-urls", *urls)
    url = f"http://127.0.0.1:{port}"
    router = Program(name, (found, *words, *flags), setting.folder, f"{url}/readiness", {"PYTHONPATH": ""})
    with running(router):
        yield [url]


def ahead_of_others() -> None:
    """Give this process and those that it starts from now on a core as soon as they need one."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError) as error:
        print(f"  times include waits of programs for a core: {error}")

"""Real programs of others: started, waited for, and certainly ended. `make engines` installs them."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shards.bundled import NAME, weights

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / os.environ.get("ENGINES", ".venv-engines")
"""The environment that the programs are in."""

PRELOADED = "PRELOADED_VLLM"
"""The variable of the environment with the socket of `preloaded_vllm`."""
PRELOADING = Path(__file__).with_name("preloaded_vllm.py")

MISSING = None if (ENGINES / ".ready").exists() else f"there is no {ENGINES.name}: `make engines` makes it"

# The program ends when the thread that started it does, even when that is killed.
_DIES_WITH_US = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
)


def program(name: str) -> str:
    """The path of a program of that environment."""
    return str(ENGINES / "bin" / name)


@contextmanager
def preloaded_vllm() -> Iterator[None]:
    """Meanwhile one process has imported vLLM, and a vLLM that is started is forked from it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as calls:
        at = f"{folder}/vllm"
        calls.bind(at)
        calls.listen()
        command = [sys.executable, "-c", _DIES_WITH_US, program("python"), str(PRELOADING), str(calls.fileno())]
        # variables that are read at imports
        environment = {**os.environ, **VLLM_ENVIRONMENT}
        with subprocess.Popen(command, env=environment, pass_fds=(calls.fileno(),), process_group=0) as process:
            os.environ[PRELOADED] = at
            try:
                yield
            finally:
                del os.environ[PRELOADED]
                process.kill()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different, below those that the system hands out by itself.

    A program that takes a minute to listen would find one of the system's own choice taken.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports += [] if port in ports else [port]
    return ports


def get(url: str, timeout_s: float = 5.0) -> bytes | None:
    """The body of a 200 at `url`; None for anything else."""
    with suppress(OSError, http.client.HTTPException), urllib.request.urlopen(url, timeout=timeout_s) as reply:
        return bytes(reply.read())
    return None


class NotStarted(AssertionError):
    """A program ended, or was not ready in time; with the end of its output."""


@dataclass
class Program:
    """A program in a process group of its own; its output goes to the file `log`."""

    name: str
    command: Sequence[str]
    folder: Path
    ready_at: str
    """A URL that answers 200 once the program is ready."""
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Its output, of all its starts."""
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of the process that was started, which leads its group."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_started(self) -> bool:
        """Whether it was started, and not ended by a test since."""
        return self._process is not None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def start(self) -> None:
        """Start it; `wait_until_ready` says when it is."""
        assert self._process is None, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DIES_WITH_US, *self.command],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait_until_ready(self, timeout_s: float = 400.0) -> None:
        """Wait until it answers; raises NotStarted if it ended or took longer than `timeout_s`."""
        assert self._process is not None
        until = time.monotonic() + timeout_s
        while get(self.ready_at) is None:
            if (status := self._process.poll()) is not None:
                raise NotStarted(f"{self.name} ended with {status}:\n{self.log_tail()}")
            if time.monotonic() > until:
                raise NotStarted(f"{self.name} was not ready after {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it and its children at once, as a crash would."""
        self._end(signal.SIGKILL, 5.0)

    def stop(self) -> None:
        """End it and its children: 15 s are theirs to do it themselves."""
        self._end(signal.SIGTERM, 15.0)

    def _end(self, by: signal.Signals, grace_s: float) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        # children that outlived the first process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class VLLM(Program):
    """A real vLLM on CPUs with the bundled model."""

    port: int = 0
    events: str | None = None
    """Address of its cache events, if it publishes them; `replay`: address of their repetition."""
    replay: str | None = None

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        text = get(f"{self.url}/metrics")
        assert text is not None, f"{self.name} tells no metrics"
        rows = [line for line in text.decode().splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in rows)

    def forget_prefixes(self) -> None:
        """Empty its prefix cache."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.status == 200


@dataclass(frozen=True)
class VLLMOptions:
    """The options of a vLLM."""

    blocks: int | None = None
    """Number of blocks of 32 tokens in its cache; None: as many as fit."""
    events: bool = True
    adapters: tuple[tuple[str, Path], ...] = ()
    """LoRA adapters by name, each a folder in the format of PEFT."""
    template: Path | None = None
    """A chat template in place of the checkpoint's."""
    extra: tuple[str, ...] = ()
    """Further options of its command line."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables of its environment."""


VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",  # packages of ours must not hide its own
    "PYTHONDONTWRITEBYTECODE": "",  # what it imports is compiled by its first start
}
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
PLAIN = VLLMOptions(blocks=600, extra=TOOLS)
"""What most tests share: 19,200 tokens of cache, events, and calls of tools."""


def a_vllm(
    name: str,
    folder: Path,
    options: VLLMOptions,
    *,
    model: Path | None = None,
    served: str = NAME,
    port: int | None = None,
) -> VLLM:
    """A vLLM with `options`, not started; `port` None: a free one. Within `preloaded_vllm` its start is a fork."""
    free, events, replay = free_ports(3)
    port = port or free
    preloaded = os.environ.get(PRELOADED)
    vllm_command = (program("vllm"),) if preloaded is None else (program("python"), str(PRELOADING), preloaded)
    words = [
        *(*vllm_command, "serve", str(model or weights()), "--served-model-name", served),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2560", "--block-size", "32", "--enable-prompt-tokens-details"),
    ]
    if options.blocks is not None:
        words += ["--num-gpu-blocks-override", str(options.blocks)]
    if options.adapters:
        words += ["--enable-lora", "--lora-modules", *(f"{name}={at}" for name, at in options.adapters)]
    if options.template is not None:
        words += ["--chat-template", str(options.template)]
    vllm = VLLM(
        name=name,
        command=(),
        folder=folder,
        ready_at=f"http://127.0.0.1:{port}/health",
        port=port,
        environment={**VLLM_ENVIRONMENT, **dict(options.environment)},
    )
    if options.events:
        vllm.events, vllm.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        kv_events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
        kv_events |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        words += ["--kv-events-config", json.dumps(kv_events)]
    vllm.command = (*words, *options.extra)
    return vllm


@dataclass
class LlamaServer(Program):
    """llama.cpp's server with the bundled model."""

    port: int = 0

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"


def a_llama_server(name: str, folder: Path, *, slots: int = 2) -> LlamaServer:
    """A llama-server with `slots` slots of 2,560 tokens, not started. Writes its model into `folder` first."""
    (port,) = free_ports(1)
    model = folder / "pointsman-reader.gguf"
    here = Path(__file__).parent
    if not model.exists():
        written = [program("python"), str(here / "as_gguf.py"), str(weights()), str(model)]
        subprocess.run(written, check=True, capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})
    return LlamaServer(
        name=name,
        command=(program("python"), str(here / "llama_server.py"), str(model), str(port), str(slots)),
        folder=folder,
        ready_at=f"http://127.0.0.1:{port}/health",
        port=port,
        environment={"PYTHONPATH": ""},
    )


def an_envoy(name: str, folder: Path, config: str) -> Program:
    """Envoy with this config, not started; its admin interface tells when it is ready."""
    (admin,) = free_ports(1)
    file = folder / f"{name}.yaml"
    file.write_text(f"{config}\nadmin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {admin}}}}}}}\n")
    quiet = ("--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warn")
    return Program(
        name=name,
        command=(program("envoy"), "-c", str(file), *quiet),
        folder=folder,
        ready_at=f"http://127.0.0.1:{admin}/ready",
    )

"""vLLM's command, in processes that are forked from one that has imported vLLM. Runs in the engines' environment.

usage: preloaded_vllm.py FD                    import vLLM, then fork for each call that comes to the socket FD
       preloaded_vllm.py SOCKET ARGUMENT...    as `vllm ARGUMENT...`, forked by the process that listens at SOCKET

A vLLM is three processes or more, and each imports vLLM: 27 of the 30 seconds of CPU that its start takes. A forked
one has the command line, environment, output and process group that it would have, and runs the same functions.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn


def main() -> None:
    """Run one of the two; in a forked process, vLLM's own main function."""
    at, *arguments = sys.argv[1:]
    if arguments:
        sys.exit(status_of(at, arguments))
    with socket.socket(fileno=int(at)) as calls:
        import_vllm()
        call = next_call(calls)
    take_over(call)
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def status_of(at: str, arguments: list[str]) -> int:
    """Have this vLLM forked into our process group; returns its exit status."""
    # it ends by the signal, then we do
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    call = {"arguments": arguments, "environment": dict(os.environ), "group": os.getpgrp(), "folder": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(at)
        socket.send_fds(line, [b"."], [1])
        line.sendall(json.dumps(call).encode())
        line.shutdown(socket.SHUT_WR)
        return int(line.recv(8) or b"1")


def import_vllm() -> None:
    """Import what the server, its engine and their workers need, and have them forked from each other too."""
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.openai.api_server
    import vllm.envs
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker

    # vLLM's platform for CPUs asks for "spawn" in the environment
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"


def next_call(calls: socket.socket) -> dict[str, Any]:
    """The call that this process was forked for; the process that calls this stays in it until it is ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        line, _ = calls.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            _, (output, *_), *_ = socket.recv_fds(line, 1, 1)
            with line.makefile("rb") as text:
                call: dict[str, Any] = json.load(text)
            if vllm := os.fork():
                report(vllm, line)
            line.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            return call
        line.close()


def report(vllm: int, line: socket.socket) -> NoReturn:
    """Send the exit status of this process, once it has ended."""
    _, status = os.waitpid(vllm, 0)
    line.send(b"%d" % (os.waitstatus_to_exitcode(status) % 256))
    os._exit(0)


def take_over(call: dict[str, Any]) -> None:
    """Become the process that was asked for."""
    os.setpgid(0, call["group"])
    die_with_parent()
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environment"])
    sys.argv = ["vllm", *call["arguments"]]


def die_with_parent() -> None:
    """End by SIGTERM when the process ends that forked this one (prctl's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


if __name__ == "__main__":
    main()

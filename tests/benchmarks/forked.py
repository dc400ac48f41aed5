"""Runs programs of this repository one after the other, each in a fork of one process that has imported the libraries.

Standard input: a JSON list of command lines, each with the program's path first. Standard output: for each a line of
JSON with its status and output. So a program costs no more than it does beyond the imports that most have in common.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback

PRELOADED = (
    "aiohttp.web",
    "router.start.app",
    "shards.engine",
    "tests.shards.tiny_checkpoints",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
)
"""What several of them import, and what starts no threads: a fork of a process with threads cannot compute."""

SECONDS = 120
"""A program that runs longer is ended."""


def run(command: list[str]) -> tuple[int, str]:
    """The status and the output of `command`, errors included."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(SECONDS)
            status = become(command)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return status, output.read()


def become(command: list[str]) -> int:
    """Run `command` in this process, as `python PROGRAM` would."""
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Run all."""
    for name in PRELOADED:
        importlib.import_module(name)
    commands = json.load(sys.stdin)
    gc.freeze()
    for command in commands:
        print(json.dumps(run(command)), flush=True)


if __name__ == "__main__":
    main()

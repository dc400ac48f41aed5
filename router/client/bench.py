"""`pointsman bench`: load for a router, and the percentiles of its times."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from policies.errors import InvalidRequest
from router.client.bench_report import BenchResult, as_svg, as_text
from router.client.chat import first_model
from router.client.chats import KEY_VARIABLE, ChatClient, Reply
from router.client.load import Load, put_load
from router.terminal import inert_console
from tls.settings import TlsSettings

_FILE_HINT = "name a file in a folder that exists"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The load for `model` (None: the first that the server lists) at the server `at`, and where results go.

    `picture` and `json` are files that are written; None: neither.
    """

    at: str
    load: Load
    model: str | None = None
    max_tokens: int = 64
    picture: Path | None = None
    json: Path | None = None
    tls: TlsSettings | None = None


def run(options: BenchOptions) -> bool:
    """Put the load, and print the result; returns whether every request was answered.

    Raises ExpectedError if the server cannot be reached at all, or if a file cannot be written.
    """
    for path in filter(None, (options.picture, options.json)):
        if path.is_dir() or not path.parent.is_dir():
            # before the load, which may take an hour
            raise InvalidRequest(f"cannot write {path}", hint=_FILE_HINT)
    result = asyncio.run(measured(options))
    try:
        # before the text: a program that reads only its beginning closes the pipe
        if options.picture is not None:
            _write(options.picture, as_svg(result))
        if options.json is not None:
            _write(options.json, json.dumps(result.record(), indent=2) + "\n")
    finally:
        print(as_text(result))  # noqa: T201
    return not result.failures


async def measured(options: BenchOptions) -> BenchResult:
    """The result of `options`' load. Raises ExpectedError if the models cannot be listed."""
    load = options.load
    async with ChatClient(options.at, os.environ.get(KEY_VARIABLE), tls=options.tls) as client:
        model = options.model or await first_model(client)

        async def ask(prompt: str) -> Reply:
            messages = [{"role": "user", "content": prompt}]
            return await client.chat(messages, model, max_tokens=options.max_tokens, fields={"temperature": 0})

        console = inert_console(stderr=True)
        with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("requests", total=load.requests)
            began = time.perf_counter()
            done = await put_load(load, ask, time.perf_counter, lambda _: bar.advance(task))
            wall_s = time.perf_counter() - began
    return BenchResult(_described(options, model), wall_s, tuple(done))


def _described(options: BenchOptions, model: str) -> str:
    load = options.load
    how = f"{load.concurrency} at a time" if load.rate is None else f"{load.rate:g} per second"
    shared = min(load.shared_words, load.words)
    return f"{load.requests:,} requests to {model}, {how}: {load.words:,} words, the first {shared:,} the same in all"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", hint=_FILE_HINT) from error

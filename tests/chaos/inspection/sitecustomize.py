"""Lets a test look into a process of ours: Python imports this file at its start, where it is on PYTHONPATH.

With POINTSMAN_INSPECT=FOLDER the process listens at FOLDER/PID.sock and answers each connection with one JSON object:
the tasks of its event loop by name, what `Router.check` objects to, the objects of our packages by class, and what is
left of requests at a shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import CoroutineType
from typing import Any

OURS = ("router.", "backends.", "http1.", "policies.")
ANSWERS_WITHIN_S = 10.0


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that the main thread runs; None while there is none. That thread goes on while its stack is read."""
    return next((loop for loop in (loop_on_stack() for _ in range(100)) if loop is not None), None)


def loop_on_stack() -> asyncio.AbstractEventLoop | None:
    """The loop that was found on the stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if isinstance(runner, asyncio.Runner):
            return runner.get_loop()
        frame = frame.f_back
    return None


def values(coroutine: Any) -> Iterator[Any]:
    """The local values of `coroutine` and of the coroutines that it awaits; of bound methods their objects."""
    while isinstance(coroutine, CoroutineType):
        if coroutine.cr_frame is not None:
            for value in coroutine.cr_frame.f_locals.values():
                yield getattr(value, "__self__", value)
        coroutine = coroutine.cr_await


def seen(loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    """The state of the router that `loop` runs."""
    tasks = asyncio.all_tasks(loop)
    router, objection = next(of_kind("router.start.app", "Router", tasks), None), None
    if router is not None:
        store = router.gateway.admission.store
        try:
            router.check()
            assert not getattr(store, "is_away", False), f"{store!r} is away"
            assert not getattr(store, "owed", 0), f"{store!r} owes settlements"
        except AssertionError as error:
            objection = str(error) or repr(error)
    server = next(of_kind("shards.server", "ShardServer", tasks), None)
    gc.collect()
    classes = (type(each) for each in gc.get_objects())
    return {
        "is_router": router is not None,
        "objection": objection,
        "shard": None if server is None else left_at(server),
        "tasks": Counter(getattr(task.get_coro(), "__qualname__", "?") for task in tasks),
        "objects": Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in classes if ours(kind)),
    }


def of_kind(module: str, name: str, tasks: set[asyncio.Task[Any]]) -> Iterator[Any]:
    """The objects of a class that the coroutines of `tasks` have at hand."""
    kind = getattr(sys.modules.get(module), name, None)
    return (value for task in tasks for value in values(task.get_coro()) if kind and isinstance(value, kind))


def left_at(server: Any) -> dict[str, int]:
    """What the shard of `server` still holds of requests; exact while its engine rests."""
    engine = server.loop._engine
    return {
        "requests": len(engine._roster.requests),
        "sequences": len(engine._roster.running) + len(engine._roster.waiting),
        "blocks": engine._pool.owned,
    }


def ours(kind: type) -> bool:
    return str(kind.__module__).startswith(OURS)


def answer(folder: str) -> None:
    """Answer connections for as long as the process lives."""
    path = Path(folder, f"{os.getpid()}.sock")
    # of another program, which this process was before it executed Python again
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                loop, done = running_loop(), Future[dict[str, Any]]()
                if loop is None:
                    connection.sendall(json.dumps({"is_router": False}).encode())
                    continue
                loop.call_soon_threadsafe(look, loop, done)
                try:
                    reply = done.result(ANSWERS_WITHIN_S)
                except Exception as error:
                    reply = {"is_router": False, "objection": f"no answer: {error!r}"}
                connection.sendall(json.dumps(reply).encode())


def look(loop: asyncio.AbstractEventLoop, done: Future[dict[str, Any]]) -> None:
    try:
        done.set_result(seen(loop))
    except Exception as error:
        done.set_exception(error)


if "POINTSMAN_INSPECT" in os.environ:
    threading.Thread(target=answer, args=(os.environ["POINTSMAN_INSPECT"],), daemon=True, name="inspection").start()

"""Ends a process with the one that started it."""

from __future__ import annotations

import os
import signal
import threading


def end_with_stdin() -> None:
    """End this process when standard input closes, which means that its supervisor is gone."""

    def wait() -> None:
        # not sys.stdin: a waiting thread holds its lock, and that aborts an interpreter that ends for another reason
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="end-with-stdin").start()

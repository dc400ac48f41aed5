"""How the threads of a router process share Python's interpreter."""

from __future__ import annotations

import sys
import threading

SWITCH_S = 0.0005
"""How long a thread may keep the interpreter while another one waits. Python's default is ten times as long."""

STACK_BYTES = 8 << 20
"""As glibc gives on most systems. musl and low limits give less than what 1,000 levels of JSON take."""


def switch_often() -> None:
    """Let the event loop wait for the interpreter for SWITCH_S at most, unless a thread is inside one call of C.

    The loop waits anew for each event that it handles, so beside a thread that parses a large body each of its rounds
    would last 5 ms times the number of connections with news.
    """
    sys.setswitchinterval(SWITCH_S)


def give_stacks() -> None:
    """Give each thread from now on STACK_BYTES, whatever the system's limit or C library says."""
    threading.stack_size(STACK_BYTES)

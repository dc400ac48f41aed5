"""File descriptors: each connection of a client and each to a backend takes one."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Allow this process as many descriptors as it may have, and return that number.

    The usual soft limit of 1,024 is for programs with select(), which the router does not use.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # some systems have a lower limit of their own
            return soft
    return hard

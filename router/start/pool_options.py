"""The options of pools: those of the kind of backend, of feeds, and of local shards."""

from __future__ import annotations

from backends.kinds import kind_of, read_option
from policies.sla.pools import Option
from router.fleet.feeds.options import FEED_OPTIONS


def check_option(kind: str, is_local: bool, name: str, value: Option) -> None:
    """Raise ValueError with a sentence if pools of `kind` have no such option, or if the value is not valid.

    Raises ConfigError if the kind comes from another distribution and cannot be loaded.

    `is_local`: `pointsman up` starts the pool's shards, so the shards' options are allowed too.
    """
    known = dict(kind_of(kind).options)
    if is_local:
        from router.start.commands.shard_options import shard_options

        known |= shard_options()
    if name not in FEED_OPTIONS:
        read_option(name, value, known, also=FEED_OPTIONS)

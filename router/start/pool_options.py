"""Which options a pool may have: those of its kind of backend, those of feeds, and those of local shards."""

from __future__ import annotations

from backends.kinds import kind_of, read_option
from policies.sla.config import Option
from router.fleet.feeds.options import FEED_OPTIONS


def check_option(kind: str, is_local: bool, name: str, value: Option) -> None:
    """Raise ValueError with a sentence if pools of `kind` have no such option, or not with this value.

    Raises ConfigError if the kind is of another distribution that cannot be loaded.

    `is_local`: the pool's shards are started by `pointsman up`, so that it has their options too.
    """
    known = dict(kind_of(kind).options)
    if is_local:
        from router.start.commands.shard_options import shard_options

        known |= shard_options()
    if name not in FEED_OPTIONS:
        read_option(name, value, known, also=FEED_OPTIONS)

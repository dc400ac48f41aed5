"""Followers on threads, for networks that need no collectives."""

from __future__ import annotations

import socket
from threading import Thread

from shards.parallel.follower import Follower
from shards.parallel.followers import Followers
from shards.parallel.leader import PartNetwork
from shards.parallel.link import PartLink


class FollowersOnThreads:
    """A follower for each of `parts`, on a thread, and the followers of them."""

    def __init__(self, *parts: PartNetwork) -> None:
        pairs = [socket.socketpair() for _ in parts]
        self.followers = Followers([PartLink(own, waits_s=10.0) for own, _ in pairs])
        self._own = [own for own, _ in pairs]
        self.errors: list[Exception] = []
        self._threads = [
            Thread(target=self._run, args=(part, PartLink(theirs, waits_s=10.0)), daemon=True)
            for part, (_, theirs) in zip(parts, pairs, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let them obey what was ordered, and end."""
        self.followers.close()
        for connection in self._own:
            connection.close()
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive(), "a follower waits for something else than an order"

    def _run(self, part: PartNetwork, link: PartLink) -> None:
        try:
            Follower(part, link).run()
        except Exception as error:
            self.errors.append(error)
        finally:
            link.close()

"""A Lua script that runs on whichever server has its keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from router.shared.redis.line import AnyRedis

_Call = tuple[Sequence[str], Sequence[str | int | bytes]]


class Script:
    """`text`, by its hash where the server knows it. A server that does not, for it is new or was restarted, gets the
    text: to load it first, as redis-py does, would need every primary of a cluster to be there."""

    def __init__(self, text: str) -> None:
        self._text, self._hash = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        return f"<Script {self._hash[:8]}>"

    async def run(self, redis: AnyRedis, keys: Sequence[str], arguments: Sequence[str | int | bytes]) -> Any:
        """The script's answer. All `keys` are in one slot of a cluster."""
        try:
            return await redis.evalsha(self._hash, len(keys), *keys, *arguments)
        except NoScriptError:
            return await redis.eval(self._text, len(keys), *keys, *arguments)

    async def run_all(self, redis: AnyRedis, calls: Sequence[_Call]) -> list[Any]:
        """The answers of several calls, in one round trip to each server. Raises the first error; then each call may
        have run or not."""
        async with redis.pipeline(transaction=False) as pipe:
            for keys, arguments in calls:
                # the pipeline of a cluster has no method for it, since it could not load a script
                pipe.execute_command("EVALSHA", self._hash, len(keys), *keys, *arguments)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        for place, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                answers[place] = await self.run(redis, *calls[place])
            elif isinstance(answer, BaseException):
                raise answer
        return answers

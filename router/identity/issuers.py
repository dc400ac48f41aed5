"""The issuers that are trusted, and the keys of each, fetched in the background."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn, Protocol

from policies.errors import Unauthenticated
from policies.identity import Issuer
from router.identity.errors import KeysAway, UnknownKey
from router.identity.key_source import FETCH_S
from router.identity.signing_keys import NO_KEYS, SigningKey, SigningKeys, read_keys
from router.supervise import supervise

REFRESH_S = 300.0
"""Time between two fetches of an issuer's keys: how long a key that it has withdrawn may still be used."""

LEAST_S = 10.0
"""Least time between two fetches that tokens of unknown keys cause."""

_RETRY_S = (1.0, 60.0)

_log = logging.getLogger("pointsman.identity")


class KeyFetcher(Protocol):
    """Where the keys of one issuer are."""

    async def fetch(self) -> bytes:
        """The JWKS document. Raises ValueError with a sentence."""
        ...


class KnownIssuer:
    """One issuer, and the keys that its tokens may be signed with.

    `run` fetches them; `on_gone` gets keys that may no longer be used, `on_event` `issuer_away` and `issuer_back`.
    `clock` is in seconds and only compared with itself.
    """

    def __init__(
        self,
        settings: Issuer,
        source: KeyFetcher,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_gone: Callable[[frozenset[SigningKey]], None],
        on_event: Callable[[str], None],
    ) -> None:
        self.settings, self._source, self._clock, self._rng = settings, source, clock, rng
        self._on_gone, self._on_event = on_gone, on_event
        self._keys = NO_KEYS
        self._fetched_at: float | None = None
        self._asked_at = float("-inf")
        self._wanted, self._next = asyncio.Event(), asyncio.Event()
        self._is_fetching = self._is_away = False
        self.trouble: str | None = None
        """Why its keys could not be fetched the last time."""

    def __repr__(self) -> str:
        return f"<KnownIssuer {self.settings.name}, {len(self._keys.keys)} keys{', away' if self._is_away else ''}>"

    def key_for(self, kid: str | None, algorithm: str) -> SigningKey:
        """The key that a token of this algorithm was signed with, if it was signed here.

        Raises UnknownKey, KeysAway, and Unauthenticated for a token that does not say which one it is.
        """
        if self._fetched_at is None:
            raise KeysAway(self, LEAST_S)
        found = self._keys.candidates(kid, algorithm)
        if not found:
            raise UnknownKey(self)
        if len(found) > 1:
            hint = "its header must have the `kid` of one key"
            raise Unauthenticated("the token does not say which key it is signed with", hint=hint)
        return found[0]

    async def refreshed(self) -> bool:
        """Wait until the keys are fetched once more. False, at once, if that happened in the last LEAST_S seconds."""
        if not self._is_fetching:
            if self._clock() - self._asked_at < LEAST_S:
                return False
            self._wanted.set()
        following = self._next
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * FETCH_S):
                await following.wait()
        return following.is_set()

    async def run(self) -> None:
        """Fetch the keys now, every REFRESH_S seconds, and when they are wanted, until cancelled."""
        failures = 0
        while True:
            failures = 0 if await self.fetch() else failures + 1
            wait_s = REFRESH_S if not failures else min(_RETRY_S[0] * 2**failures, _RETRY_S[1])
            with suppress(TimeoutError):
                # not all routers at once
                async with asyncio.timeout(wait_s * self._rng.uniform(0.8, 1.2)):
                    await self._wanted.wait()

    async def fetch(self) -> bool:
        """Fetch the keys, and return whether that went well; if not, keep the old ones for as long as the file says."""
        self._asked_at, self._is_fetching = self._clock(), True
        self._wanted.clear()
        try:
            # a hundred keys take up to 70 ms
            self._take(await asyncio.to_thread(read_keys, await self._source.fetch(), self._keys))
        except ValueError as error:
            self._fail(str(error))
        finally:
            self._is_fetching = False
            self._next.set()
            self._next = asyncio.Event()
        return not self._is_away

    def _take(self, keys: SigningKeys) -> None:
        gone = frozenset(self._keys.keys) - frozenset(keys.keys)
        self._keys, self._fetched_at = keys, self._clock()
        if gone:
            self._on_gone(gone)
        if self._is_away:
            _log.info("issuer %s answers again", self.settings.name)
            self._on_event("issuer_back")
        self._is_away, self.trouble = False, None

    def _fail(self, why: str) -> None:
        if not self._is_away or self.trouble != why:
            _log.warning("the keys of issuer %s cannot be fetched: %s", self.settings.name, why)
        if not self._is_away:
            self._on_event("issuer_away")
        self._is_away, self.trouble = True, why
        if self._fetched_at is not None and self._clock() - self._fetched_at > self.settings.keep_s:
            _log.warning("the keys of issuer %s are too old and no longer used", self.settings.name)
            self._on_gone(frozenset(self._keys.keys))
            self._keys, self._fetched_at = NO_KEYS, None


MakeSource = Callable[[Issuer], KeyFetcher]


class Issuers:
    """The issuers of the file in force: `follow` takes those of a file, `run` fetches the keys of each."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock, self._rng, self._on_event = clock, rng, on_event
        self.on_gone: Callable[[frozenset[SigningKey]], None] = lambda _: None
        self._by_url: dict[str, KnownIssuer] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Issuers {list(self._by_url.values())}>"

    def known(self) -> list[KnownIssuer]:
        """All of them."""
        return list(self._by_url.values())

    def at(self, url: object) -> KnownIssuer | None:
        """The issuer that tokens name so; None for one that is not trusted."""
        return self._by_url.get(url) if isinstance(url, str) else None

    def follow(self, issuers: Mapping[str, Issuer], source_of: MakeSource) -> None:
        """Trust these `issuers` from now on, and no others; `source_of` makes the source of each one's keys.

        Keys of an issuer are kept as long as nothing in its settings changes.
        """
        before, self._by_url = self._by_url, {}
        for settings in issuers.values():
            known = before.get(settings.url)
            is_same = known is not None and known.settings == settings
            self._by_url[settings.url] = (
                known if known is not None and is_same else self._made(settings, source_of(settings))
            )
        self._changed.set()

    async def run(self) -> NoReturn:
        """Fetch the keys of all issuers, one task for each, until cancelled."""
        tasks: dict[KnownIssuer, asyncio.Task[None]] = {}
        try:
            while True:
                self._changed.clear()
                wanted = set(self._by_url.values())
                for issuer in tasks.keys() - wanted:
                    tasks.pop(issuer).cancel()
                for issuer in wanted - tasks.keys():
                    name = f"keys of issuer {issuer.settings.name}"
                    tasks[issuer] = asyncio.create_task(supervise(name, issuer.run), name=name)
                await self._changed.wait()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _made(self, settings: Issuer, source: KeyFetcher) -> KnownIssuer:
        return KnownIssuer(
            settings,
            source,
            clock=self._clock,
            rng=self._rng,
            on_gone=self._gone,
            on_event=self._on_event,
        )

    def _gone(self, keys: frozenset[SigningKey]) -> None:
        self.on_gone(keys)

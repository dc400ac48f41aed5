"""The keys of an issuer: fetched in the background, again when they are wanted, and kept while it is away."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from policies.errors import Unauthenticated
from policies.identity import Issuer
from router.identity import issuers as module
from router.identity.errors import KeysAway, UnknownKey
from router.identity.issuers import LEAST_S, Issuers, KnownIssuer
from router.identity.key_source import KeySource, is_safe
from router.identity.signing_keys import SigningKey, read_keys
from tests.router.fleet.feeds.waiting import until
from tests.router.identity.local_issuer import a_key, a_local_issuer, an_rsa_key, jwk_of

SETTINGS = Issuer("corp", "https://login.example.com", frozenset({"pointsman"}), keep_s=3600.0)
KEYS = [jwk_of(a_key("ES256"), kid="a"), jwk_of(a_key("ES256"), kid="b")]


def document(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


class Scripted:
    """Gives the next of its answers at each fetch, and the last one again and again."""

    def __init__(self, *answers: bytes | str) -> None:
        self.answers, self.fetches = list(answers), 0

    async def fetch(self) -> bytes:
        self.fetches += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer


class Scene:
    """One issuer with a clock that the test moves."""

    def __init__(self, *answers: bytes | str) -> None:
        self.now, self.source = 1000.0, Scripted(*answers)
        self.gone: list[frozenset[SigningKey]] = []
        self.events: list[str] = []
        self.issuer = KnownIssuer(
            SETTINGS,
            self.source,
            clock=lambda: self.now,
            rng=random.Random(1),
            on_gone=self.gone.append,
            on_event=self.events.append,
        )


async def test_keys_are_unknown_until_they_were_fetched() -> None:
    scene = Scene(document(*KEYS))
    with pytest.raises(KeysAway) as caught:
        scene.issuer.key_for("a", "ES256")
    assert caught.value.retry_after_s == LEAST_S
    assert await scene.issuer.fetch()
    assert scene.issuer.key_for("a", "ES256").kid == "a"
    with pytest.raises(UnknownKey):
        scene.issuer.key_for("c", "ES256")
    with pytest.raises(UnknownKey):
        scene.issuer.key_for("a", "RS256")
    with pytest.raises(Unauthenticated, match="does not say which key"):
        scene.issuer.key_for(None, "ES256")


async def test_a_key_that_stays_is_the_same_object_and_one_that_goes_is_told() -> None:
    scene = Scene(document(*KEYS), document(KEYS[1]))
    await scene.issuer.fetch()
    first, second = scene.issuer.key_for("a", "ES256"), scene.issuer.key_for("b", "ES256")
    await scene.issuer.fetch()
    assert scene.issuer.key_for("b", "ES256") is second
    assert scene.gone == [frozenset({first})]


async def test_while_the_issuer_is_away_its_keys_are_used_for_as_long_as_the_file_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(document(*KEYS), "it is away", "it is away", "it is away", document(*KEYS))
    await scene.issuer.fetch()
    key = scene.issuer.key_for("a", "ES256")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scene.now += 1800
            assert not await scene.issuer.fetch()
            assert scene.issuer.key_for("a", "ES256") is key
        assert [record.message for record in caplog.records] == [
            "the keys of issuer corp cannot be fetched: it is away"
        ], "once, not at every try"
        scene.now += 1
        assert not await scene.issuer.fetch()
    with pytest.raises(KeysAway):
        scene.issuer.key_for("a", "ES256")
    assert len(scene.gone) == 1
    assert await scene.issuer.fetch()
    assert scene.issuer.key_for("a", "ES256").kid == "a"
    assert scene.events == ["issuer_away", "issuer_back"]


async def test_a_fetch_that_is_wanted_happens_at_most_every_ten_seconds() -> None:
    scene = Scene(document(*KEYS))
    running = asyncio.create_task(scene.issuer.run())
    try:
        await until(lambda: scene.source.fetches > 0)
        assert not await scene.issuer.refreshed(), "the first fetch was just now"
        scene.now += LEAST_S
        assert await asyncio.gather(*(scene.issuer.refreshed() for _ in range(50))) == [True] * 50
        assert scene.source.fetches == 2
        assert not await scene.issuer.refreshed()
        assert scene.source.fetches == 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_keys_are_fetched_again_after_a_while_and_sooner_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    monkeypatch.setattr(module, "_RETRY_S", (0.001, 0.002))
    scene = Scene("it is away", "it is away", document(*KEYS))
    running = asyncio.create_task(scene.issuer.run())
    await until(lambda: scene.source.fetches >= 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert scene.events == ["issuer_away", "issuer_back"]


def tasks() -> list[asyncio.Task[Any]]:
    """Those that fetch keys."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("keys of issuer")]


async def test_issuers_follow_the_file() -> None:
    sources: dict[str, Scripted] = {}

    def source_of(issuer: Issuer) -> Scripted:
        return sources.setdefault(issuer.name, Scripted(document(*KEYS)))

    issuers = Issuers(clock=lambda: 0.0, rng=random.Random(1))
    issuers.follow({"corp": SETTINGS}, source_of)
    running = asyncio.create_task(issuers.run())
    try:
        await until(lambda: "corp" in sources and sources["corp"].fetches > 0)
        corp = issuers.at(SETTINGS.url)
        other = Issuer("other", "https://other.example.com", frozenset({"a"}))
        issuers.follow({"corp": SETTINGS, "other": other}, source_of)
        await until(lambda: "other" in sources and sources["other"].fetches > 0)
        assert issuers.at(SETTINGS.url) is corp
        assert sources["corp"].fetches == 1, "it is unchanged"
        issuers.follow({"other": other}, source_of)
        assert issuers.at(SETTINGS.url) is None
        assert issuers.at(7) is None
        await until(lambda: len(tasks()) == 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not tasks()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (b"no json", "its key document is not JSON"),
        (b"[]", "has no list `keys`"),
        (b'{"keys": {}}', "has no list `keys`"),
        (document(), "has no key that can verify a signature"),
        (document({"kty": "oct", "k": "c2VjcmV0"}), "has no key that can verify"),
        (document({**KEYS[0], "use": "enc"}), "has no key that can verify"),
        (document({**KEYS[0], "key_ops": ["encrypt"]}), "has no key that can verify"),
        (document({**KEYS[0], "x": "AAAA"}), "has no key that can verify"),
        (document({"kty": "RSA", "n": "AQAB", "e": "AQAB"}), "has no key that can verify"),
        (document(jwk_of(an_rsa_key(1, 1024))), "has no key that can verify"),
        (document({"kty": "RSA", "n": 7, "e": 3}), "has no key that can verify"),
    ],
)
def test_a_document_without_a_usable_key_says_so(keys: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("`", ".")):
        read_keys(keys)


def test_what_cannot_be_used_is_left_out_and_private_parts_are_not_read() -> None:
    keys = read_keys(document({**KEYS[0], "d": "AAAA"}, {"kty": "new"}, 7, {"kty": "oct", "k": "eA"}))  # type: ignore[arg-type]
    [key] = keys.keys
    assert not key.public.is_private


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://x/keys", True),
        ("http://127.0.0.1/keys", True),
        ("http://localhost:80/keys", True),
        ("http://[::1]/keys", True),
        ("http://x/keys", False),
        ("http://10.0.0.1/keys", False),
        ("file:///etc/passwd", False),
        ("https://", False),
        ("https://x:port/", False),
        ("https://x:0/", False),
    ],
)
def test_keys_come_over_https_or_from_this_machine(url: str, safe: bool) -> None:
    assert is_safe(url) == safe


async def test_what_goes_wrong_at_an_issuer_is_said_in_a_sentence(tmp_path: Path) -> None:
    async with a_local_issuer("ES256") as local:

        async def failure(**changed: Any) -> str:
            issuer = Issuer("corp", changed.pop("url", local.url), frozenset({"a"}), **changed)
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is what the test looks at
                await KeySource(issuer).fetch()
            return str(caught.value)

        local.discovery = {"issuer": "https://another.example.com", "jwks_uri": "https://x/keys"}
        assert "its discovery document names another issuer" in await failure()
        local.discovery = {"issuer": local.url, "jwks_uri": "http://keys.example.com/"}
        assert "has no jwks_uri with https" in await failure()
        local.discovery = ["no", "object"]
        assert "names another issuer" in await failure()
        local.discovery = None
        assert "/missing answered with status 404" in await failure(jwks=f"{local.url}/missing?secret=1")
        local.document = "x" * (1 << 20)
        assert "answered with more than 1 MiB" in await failure(jwks=f"{local.url}/keys")
        assert "cannot be reached" in await failure(jwks="http://127.0.0.1:1/keys")
        assert "its file of keys cannot be read" in await failure(jwks=str(tmp_path / "missing.json"))
    assert "cannot be reached" in await failure()

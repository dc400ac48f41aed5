"""Tokens are verified byte by byte, and kept until they expire."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import Unauthenticated
from policies.identity import Issuer
from router.identity import tokens as module
from router.identity.issuers import Issuers
from router.identity.signing_keys import read_keys
from router.identity.tokens import Verifier
from tests.router.identity.local_issuer import LocalIssuer, a_key, base64url, jwk_of, signed

URL = "https://login.example.com"


class Clock:
    """Unix time that a test sets."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def a_document(local: LocalIssuer) -> bytes:
    """The JWKS document with its keys."""
    return json.dumps({"keys": [jwk_of(key, kid=kid) for kid, (_, key) in local.keys.items()]}).encode()


def a_source(local: LocalIssuer) -> Any:
    class Published:
        async def fetch(self) -> bytes:
            return a_document(local)

    return Published()


def a_local(*algorithms: str) -> LocalIssuer:
    local = LocalIssuer(URL)
    for number, algorithm in enumerate(algorithms or ("ES256",)):
        local.add(f"k{number}", algorithm, number)
    return local


async def a_verifier(local: LocalIssuer, clock: Clock | None = None, **changed: Any) -> Verifier:
    issuers = Issuers(clock=time.monotonic, rng=random.Random(1))
    verifier = Verifier(issuers, unix_time=clock or Clock())
    issuer = Issuer("corp", URL, frozenset({"pointsman"}), **changed)
    verifier.follow({"corp": issuer}, lambda _: a_source(local))
    [known] = issuers.known()
    assert await known.fetch()
    return verifier


async def test_a_verified_token_is_looked_up_until_it_expires() -> None:
    local, clock = a_local(), Clock()
    verifier = await a_verifier(local, clock, skew_s=10.0)
    token = local.token(exp=int(clock.now) + 100)
    first = verifier.find(token)
    assert first is not None
    assert (first.issuer, first.claims["sub"]) == ("corp", "u-17")
    assert verifier.find(token) is first
    clock.now += 111
    with pytest.raises(Unauthenticated, match="has expired"):
        verifier.find(token)
    with pytest.raises(Unauthenticated, match="has expired"):
        verifier.find(token)


async def test_text_that_is_no_token_is_left_to_keys() -> None:
    verifier = await a_verifier(a_local())
    for text in ("", "pm_abc", "a.b.c", "eyJhbGciOiJub25lIn0", "eyJ.a.b.c"):
        assert verifier.find(text) is None


async def test_the_number_of_kept_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KNOWN", 3)
    local = a_local()
    verifier = await a_verifier(local)
    tokens = [local.token(jti=str(number)) for number in range(5)]
    found = [verifier.find(token) for token in tokens]
    assert len(verifier._known) == 3
    assert verifier.find(tokens[4]) is found[4]
    assert verifier.find(tokens[0]) is not found[0]


async def test_a_token_without_a_key_id_is_verified_if_one_key_fits() -> None:
    local = a_local("ES256", "RS256")
    verifier = await a_verifier(local)
    algorithm, key = local.keys["k0"]
    assert verifier.find(signed({"alg": algorithm}, local.claims(), key)) is not None
    local.add("k2", "ES256")
    again = await a_verifier(local)
    with pytest.raises(Unauthenticated, match="does not say which key"):
        again.find(signed({"alg": algorithm}, local.claims(), key))


@pytest.mark.parametrize("algorithm", ["ES256", "EdDSA", "RS256"])
async def test_no_byte_of_a_token_can_be_changed(algorithm: str) -> None:
    local = a_local(algorithm)
    verifier = await a_verifier(local)
    token = local.token()
    assert verifier.find(token) is not None
    rng = random.Random(7)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.="
    for at in range(len(token)):
        changed = token[:at] + rng.choice(letters.replace(token[at], "")) + token[at + 1 :]
        try:
            assert verifier.find(changed) is None, f"byte {at} was changed"
        except Unauthenticated:
            continue


async def test_the_last_letter_of_a_signature_cannot_be_written_in_another_way() -> None:
    """Base64 has several texts for some bytes; only one of them is the token."""
    local = a_local("RS256")
    verifier = await a_verifier(local)
    token = local.token()
    for other in (token + "=", token + "==", token + "\n", token + ".", " " + token):
        try:
            assert verifier.find(other) is None
        except Unauthenticated:
            continue


LOCAL = a_local("ES256")


def a_filled_verifier() -> Verifier:
    """One that has the keys of LOCAL without a fetch."""
    issuers = Issuers(clock=time.monotonic, rng=random.Random(1))
    verifier = Verifier(issuers, unix_time=time.time)
    verifier.follow({"corp": Issuer("corp", URL, frozenset({"pointsman"}))}, lambda _: a_source(LOCAL))
    [known] = issuers.known()
    known._take(read_keys(a_document(LOCAL)))
    return verifier


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
CLAIMS = st.dictionaries(st.sampled_from(["iss", "aud", "exp", "nbf", "sub", "iat"]), JSON | st.just(URL), max_size=6)
HEADERS = st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64", "jwk", "zip"]), JSON, max_size=4)


@settings(max_examples=200, deadline=None)
@given(header=HEADERS, claims=CLAIMS, good_header=st.booleans(), good_claims=st.booleans(), raw=st.binary(max_size=30))
def test_nonsense_is_refused_and_never_breaks_the_router(
    header: Any, claims: Any, good_header: bool, good_claims: bool, raw: bytes
) -> None:
    local, verifier = LOCAL, a_filled_verifier()
    head = {"alg": "ES256", "kid": "k0"} if good_header else header
    body = {**local.claims(), **claims} if good_claims else claims
    for token in (
        signed(head, body, local.keys["k0"][1]),
        f"eyJ{base64url(raw)}.{base64url(raw)}.{base64url(raw)}",
        f"eyJ{raw.decode('latin-1')}.x.y",
    ):
        with suppress(Unauthenticated):
            found = verifier.find(token)
            assert found is None or (found.claims["iss"], found.claims["exp"] > 0) == (URL, True)


def test_a_key_that_fits_two_algorithms_is_used_for_the_one_that_it_names() -> None:
    [key] = read_keys(json.dumps({"keys": [jwk_of(a_key("RS256"), alg="RS256")]}).encode()).keys
    assert key.fits("RS256")
    assert not key.fits("PS256")
    assert not key.fits("ES256")

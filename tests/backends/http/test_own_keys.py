"""A server's words are shown without the keys that the router sends to it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.own_keys import HIDDEN, OwnKeys, _any_of
from policies.errors import BackendFailed, InvalidRequest

KEY = 'sk-"pool"/0123 \\ü'
SPELLINGS: list[Callable[[str], str]] = [
    str,
    lambda key: json.dumps(key, ensure_ascii=False)[1:-1],
    lambda key: json.dumps(key, ensure_ascii=False)[1:-1].replace("/", "\\/"),
    quote,
    lambda key: quote(key, safe=""),
]


@given(
    st.text(min_size=4, max_size=30).filter(lambda key: key not in HIDDEN),
    st.sampled_from(SPELLINGS),
    st.text("abc ", max_size=5),
)
def test_a_key_is_hidden_however_it_is_spelt(key: str, spelt: Callable[[str], str], around: str) -> None:
    text = f"{around}{spelt(key)}{around}"
    keys = OwnKeys({}, key)
    assert key not in keys.hidden(text).replace(HIDDEN, "")
    assert HIDDEN in keys.hidden(text)
    assert HIDDEN.encode() in keys.hidden_bytes(text.encode(errors="surrogatepass"))


@pytest.mark.parametrize(
    ("headers", "secret"),
    [
        ({"api-key": "azure-secret"}, "azure-secret"),
        ({"Authorization": "Bearer of-a-proxy"}, "of-a-proxy"),
        ({"Authorization": "Basic " + base64.b64encode(b"me:pass word").decode()}, "pass word"),
        ({"cookie": "session=1234"}, "session=1234"),
        ({"X-Auth-Token": "tokentoken"}, "tokentoken"),
    ],
)
def test_secrets_in_headers_of_the_file_are_hidden_too(headers: dict[str, str], secret: str) -> None:
    assert OwnKeys(headers, None).hidden(f"not {secret}!") == f"not {HIDDEN}!"


def test_what_is_no_secret_or_too_short_for_one_stays() -> None:
    text = "anthropic-version 2023-06-01 is not valid, ok?"
    assert OwnKeys({"anthropic-version": "2023-06-01"}, "ok?").hidden(text) == text
    assert OwnKeys({}, None).hidden_bytes(b"\xff") == b"\xff"
    assert OwnKeys({}, KEY).hidden_bytes(b"\xff") == b"\xff"


@pytest.mark.parametrize("kind", [InvalidRequest, BackendFailed])
def test_no_text_of_an_error_has_the_key(kind: type[InvalidRequest] | type[BackendFailed]) -> None:
    error = kind(f"no {KEY}", hint=f"change {KEY}", param=KEY)
    OwnKeys({}, KEY).hide_in(error)
    shown = (str(error), repr(error), error.message, error.hint, error.public_message, error.public_hint, error.param)
    assert not any(KEY in (text or "") for text in shown)
    assert HIDDEN in error.message


def test_errors_without_the_key_are_left_alone() -> None:
    error = InvalidRequest("no", hint="x")
    OwnKeys({}, KEY).hide_in(error)
    assert (str(error), error.param) == ("no (x)", None)
    assert "some" in repr(OwnKeys({}, KEY))
    assert "none" in repr(OwnKeys({}, None))


def test_secrets_of_the_file_in_force_are_hidden_beside_the_servers_own() -> None:
    of_file = frozenset({"other-pools-key"})
    keys = OwnKeys({}, KEY, lambda: of_file)
    assert keys.hidden(f"{KEY} other-pools-key next-key") == f"{HIDDEN} {HIDDEN} next-key"
    of_file = frozenset({"next-key"})
    assert keys.hidden(f"{KEY} other-pools-key next-key") == f"{HIDDEN} other-pools-key {HIDDEN}"


PARTS = st.text("ab.", min_size=1, max_size=20)


@given(st.sets(PARTS, min_size=1, max_size=12), st.text("ab.x", max_size=60))
def test_of_keys_that_begin_alike_the_longest_is_hidden(keys: set[str], text: str) -> None:
    each = re.compile("|".join(map(re.escape, sorted(keys, key=len, reverse=True))))
    assert re.compile(_any_of(keys)).sub("#", text) == each.sub("#", text)


def test_what_keys_have_in_common_is_looked_for_once() -> None:
    assert _any_of(["sk-ab1", "sk-ab2", "sk-c", "x"]) == r"x|sk\-(?:c|ab(?:2|1))"
    many = _any_of(f"sk-{number:04}" for number in range(10_000))
    assert many.count("sk") == 1
    assert OwnKeys({}, None, lambda: frozenset("k" * size for size in range(4, 200))).hidden("k" * 199) == HIDDEN

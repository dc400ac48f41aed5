"""Parameters that a model's publisher recommends, beside vLLM's `--generation-config auto`."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.shard.defaults import defaults_in, with_defaults
from policies.nouns import DIALS
from router.protocols.openai.request import chat_ask

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": 2}


def found(**file: object) -> dict[str, Any]:
    return dict(defaults_in(json.dumps(file).encode(), "s0"))


def test_the_dials_of_the_file_are_defaults_and_the_rest_is_none() -> None:
    assert found(**QWEN) == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert found(eos_token_id=[1, 2], max_length=20, temperature=None) == {}


def _asked(**fields: object) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return with_defaults(chat_ask(body).sampling, body, found(**QWEN))


@given(st.dictionaries(st.sampled_from(sorted(DIALS)), st.just(1) | st.none()))
def test_what_a_client_names_counts_and_the_file_says_the_rest(named: dict[str, int | None]) -> None:
    sampling, defaults = _asked(**named), found(**QWEN)
    for name in DIALS:
        if named.get(name) is not None:
            assert getattr(sampling, name) == named[name]
        elif name in defaults:
            assert getattr(sampling, name) == defaults[name]


def test_a_greedy_client_stays_greedy() -> None:
    assert _asked(temperature=0).temperature == 0
    assert _asked(temperature=0, seed=5, stop="x").repetition_penalty == 1.05


@pytest.mark.parametrize(
    "file",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 2},
        {"top_k": 1.5},
        {"repetition_penalty": 0},
        {"temperature": [1]},
    ],
)
def test_a_value_that_no_client_may_ask_for_is_left_out_and_said(
    file: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    assert found(**file, min_p=0.1) == {"min_p": 0.1}
    assert f"{next(iter(file))} is left out" in caplog.text


@pytest.mark.parametrize("file", [b"", b"[]", b"{", b"\xff", b"null", b'"a"', b"1"])
def test_a_file_that_is_none_gives_no_defaults(file: bytes) -> None:
    assert dict(defaults_in(file, "s0")) == {}


def test_the_file_is_said_once_it_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found(**QWEN)
    assert "temperature 0.7, top_p 0.8, top_k 20" in caplog.text


@pytest.mark.parametrize(("given", "dial", "value"), [({"top_p": 0}, "temperature", 0), ({"top_k": -1}, "top_k", 0)])
def test_values_for_off_mean_what_they_mean_from_a_client(given: dict[str, float], dial: str, value: float) -> None:
    assert (
        getattr(
            with_defaults(
                chat_ask({"model": "m", "messages": [{"role": "user", "content": "a"}]}).sampling, None, given
            ),
            dial,
        )
        == value
    )

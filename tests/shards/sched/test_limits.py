from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest

from shards.nouns import Cause, Grammar, GrammarForm, SamplingParams, Submission
from shards.sched.limits import Limits, peak_blocks
from shards.wire.limits import MOST_GRAMMAR_CHARACTERS

LIMITS = Limits(vocabulary=100, context_tokens=1000, blocks=8, has_tokenizer=True)


def a_submission(**changes: object) -> Submission:
    return Submission(**{"key": 1, "prompt_tokens": 10, "max_new_tokens": 5, **changes})  # type: ignore[arg-type]


def test_the_last_token_is_drawn_and_needs_no_kv():
    assert peak_blocks(64, 1) == 1
    assert peak_blocks(64, 2) == 2


def test_a_sound_submission_is_taken():
    assert LIMITS.refusal(a_submission()) is None


@pytest.mark.parametrize(
    ("changes", "hint", "cause"),
    [
        ({"prompt_tokens": 0}, "at least one token", Cause.INVALID),
        ({"prompt_tokens": -5}, "at least one token", Cause.INVALID),
        ({"max_new_tokens": 0}, "at least 1", Cause.INVALID),
        ({"max_new_tokens": 991}, "context is 1000", Cause.CONTEXT),
        ({"prompt_tokens": 500, "max_new_tokens": 100}, "need 10 KV blocks and this shard has 8", Cause.CONTEXT),
        ({"choices": 0}, "between 1 and 128", Cause.INVALID),
        ({"choices": 10**9}, "between 1 and 128", Cause.INVALID),
    ],
)
def test_sizes_that_cannot_be_served_are_refused_with_a_hint(changes, hint, cause):
    refusal = LIMITS.refusal(a_submission(**changes))
    assert refusal is not None
    assert hint in refusal.message
    assert refusal.cause is cause


@pytest.mark.parametrize(
    ("sampling", "hint"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"min_new_tokens": 6}, "min_new_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {100: 1.0}}, "token 100"),
        ({"logit_bias": {1: math.nan}}, "finite"),
        ({"stop_token_ids": frozenset({-1})}, "token -1"),
        ({"stop": ("",)}, "stop string is empty"),
        ({"stop": ("x" * 2000,)}, "longer than"),
        ({"stop": ("x",) * 65}, "at most 64"),
    ],
)
def test_sampling_out_of_range_is_refused_with_its_name(sampling, hint):
    refusal = LIMITS.refusal(a_submission(sampling=SamplingParams(**sampling)))
    assert refusal is not None
    assert hint in refusal.message


def test_a_bias_has_any_number_of_tokens_but_not_of_values():
    limits = replace(LIMITS, vocabulary=5000)
    banned = dict.fromkeys(range(5000), -100.0)
    assert limits.refusal(a_submission(sampling=SamplingParams(logit_bias=banned))) is None
    refusal = limits.refusal(a_submission(sampling=SamplingParams(logit_bias={t: float(t) for t in range(1024)})))
    assert refusal is not None
    assert "1024 different values; at most 1023 are supported: round them" in refusal.message


def test_stop_strings_need_a_tokenizer():
    submission = a_submission(sampling=SamplingParams(stop=("x",)))
    assert LIMITS.refusal(submission) is None
    assert "no tokenizer" in replace(LIMITS, has_tokenizer=False).refusal(submission).message


@pytest.mark.parametrize(
    ("piece", "hint"),
    [(b"\0\0\0", "3 bytes"), (struct.pack("<I", 100), "token 100"), (struct.pack("<6I", *range(6)), "1 more tokens")],
)
def test_a_piece_that_is_no_part_of_the_prompt_is_refused(piece, hint):
    refusal = LIMITS.piece_refusal(piece, missing_tokens=5)
    assert refusal is not None
    assert hint in refusal.message


def test_an_empty_piece_is_fine():
    assert LIMITS.piece_refusal(b"", missing_tokens=5) is None


def test_a_grammar_is_refused_where_none_is_understood_or_it_is_too_long():
    short, long = (Grammar(GrammarForm.REGEX, "a" * (MOST_GRAMMAR_CHARACTERS + more)) for more in (0, 1))
    able = replace(LIMITS, shapes_answers=True)
    for limits, grammar, because in ((LIMITS, short, "llguidance"), (able, long, "131073"), (able, short, None)):
        refusal = limits.refusal(a_submission(sampling=SamplingParams(grammar=grammar)))
        if because is None:
            assert refusal is None
        else:
            assert refusal is not None
            assert because in refusal.message
            assert refusal.cause is Cause.GRAMMAR

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from shards.exec.fake import FakeNetwork
from shards.grammar.compiler import CannotCompile, Compiler
from shards.grammar.guide import Guide
from shards.grammar.library import FORMATS, Library, rules_of
from shards.model import Model
from shards.nouns import Grammar, GrammarForm
from tests.shards.grammar.parts import (
    END,
    VOCABULARY,
    a_compiler,
    a_model,
    a_narrow_compiler,
    a_setting,
    a_tokenizer,
    end_id,
)


def a_guide(form: GrammarForm, text: str) -> Guide:
    return a_compiler().compile(Grammar(form, text)).guide()


def follow(guide: Guide, text: str) -> bool:
    """Goes along `text` as far as it may; whether that was all of it."""
    for token in a_tokenizer().encode(text, add_special_tokens=False).ids:
        if not guide.allowed()[token]:
            return False
        guide.note(token)
    return True


@pytest.mark.parametrize(
    ("form", "text", "because"),
    [
        (GrammarForm.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarForm.JSON_SCHEMA, '{"type": "objekt"}', "Invalid type: objekt"),
        (GrammarForm.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "nowhere"),
        (GrammarForm.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        (GrammarForm.JSON_SCHEMA, "{", "line 1"),
        (GrammarForm.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        (GrammarForm.JSON_SCHEMA, "[1]", "object schema"),
        (GrammarForm.JSON_SCHEMA, '{"enum": []}', "Unsatisfiable"),
        (GrammarForm.JSON_SCHEMA, '{"a":' * 5000 + "1" + "}" * 5000, "recursion limit"),
        (GrammarForm.REGEX, "(((", "unclosed group"),
        (GrammarForm.REGEX, "(" * 20_000 + "a" + ")" * 20_000, "regex"),
        (GrammarForm.JSON_SCHEMA, '{"$ref": "#"}', "no answer fits"),
        (GrammarForm.CHOICE, "[]", "a list of texts"),
        (GrammarForm.CHOICE, "[1]", "a list of texts"),
        (GrammarForm.CHOICE, "x", "Expecting value"),
        (GrammarForm.RULES, 'root ::= "a" | b', "Rule 'b' not found"),
        (GrammarForm.RULES, "start: b", "unknown name"),
        (GrammarForm.RULES, "", "No 'root' rule"),
    ],
)
def test_what_cannot_be_held_to_is_refused_with_its_reason(form: GrammarForm, text: str, because: str) -> None:
    with pytest.raises(CannotCompile, match=because):
        a_guide(form, text)


@pytest.mark.parametrize("known", sorted(FORMATS - {"unknown"}))
def test_a_format_that_is_known_is_held_to(known: str) -> None:
    assert not follow(a_guide(GrammarForm.JSON_SCHEMA, f'{{"type": "string", "format": "{known}"}}'), '"a b"')


@pytest.mark.parametrize(
    "unknown", ["int64", "password", "binary", "path", "uri-reference", "uuid4", "json-string", ""]
)
@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "string", "format": "%s"}',
        '{"anyOf": [{"type": "null"}, {"type": "string", "format": "%s"}]}',
        '{"$defs": {"format": {"type": "string", "format": "%s"}}, "$ref": "#/$defs/format"}',
    ],
)
def test_a_format_that_is_unknown_is_a_remark_and_holds_the_answer_to_nothing(schema: str, unknown: str) -> None:
    assert follow(a_guide(GrammarForm.JSON_SCHEMA, schema % unknown), '"a b"')


def test_a_property_and_data_may_be_called_format() -> None:
    named = '{"type": "object", "properties": {"format": {"enum": [{"format": "int64"}]}}, "required": ["format"]}'
    assert follow(a_guide(GrammarForm.JSON_SCHEMA, named), '{"format": {"format": "int64"}}')


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"\d{2}", "42", "৪২"),
        (r"[\d.]{3}", "4.2", "৪.২"),
        (r"\D", "a", "4"),
        (r"[^\D]", "4", "৪"),
        (r"\w{2}", "a_", "éa"),
        (r"[\w-]+@\w+", "a-b@c", "a-é@c"),
        (r"\W", "é", "a"),
        (r"\\d", r"\d", "4"),
        (r"\\\d", r"\4", r"\d"),
        (r"\[\d\]", "[4]", "[৪]"),
    ],
)
def test_digits_and_letters_of_an_expression_are_those_of_ascii_as_in_a_schema(
    pattern: str, fits: str, does_not: str
) -> None:
    quoted = json.dumps({"type": "string", "pattern": f"^{pattern}$"})
    for text, is_fitting in ((fits, True), (does_not, False)):
        assert follow(a_guide(GrammarForm.REGEX, pattern), text) is is_fitting
        assert follow(a_guide(GrammarForm.JSON_SCHEMA, quoted), json.dumps(text, ensure_ascii=False)) is is_fitting


def test_a_form_of_tomorrow_is_refused_too() -> None:
    compiler = a_compiler()
    with pytest.raises(CannotCompile, match="older than the router"):
        compiler.compile(Grammar(None, "x"))


def test_an_answer_may_end_where_it_is_whole_and_is_over_where_nothing_can_be_added() -> None:
    guide = a_guide(GrammarForm.REGEX, "ab?")
    assert not guide.allowed()[end_id()]
    assert follow(guide, "a")
    assert guide.allowed()[end_id()]
    assert not guide.is_over
    assert follow(guide, "b")
    assert guide.is_over


def test_every_answer_begins_anew() -> None:
    compiler = a_compiler()
    compiled = compiler.compile(Grammar(GrammarForm.CHOICE, json.dumps(["yes", "Grüße\n", 'q"\\'])))
    for text in ("yes", "Grüße\n", 'q"\\'):
        guide = compiled.guide()
        assert follow(guide, text)
        assert guide.is_over
    assert not follow(compiled.guide(), "nay")


@pytest.mark.parametrize("text", ['{"a":1}', '{"a": 1}', '{\n    "a": 1\n}'])
def test_json_may_be_written_as_models_write_it(text: str) -> None:
    guide = a_guide(GrammarForm.JSON_SCHEMA, '{"type":"object","properties":{"a":{"const":1}},"required":["a"]}')
    assert follow(guide, text)


def test_white_space_has_an_end() -> None:
    assert follow(a_guide(GrammarForm.JSON_SCHEMA, '{"type":"object"}'), "{\n")
    assert not follow(a_guide(GrammarForm.JSON_SCHEMA, '{"type":"object"}'), "{\n\n")
    assert not follow(a_guide(GrammarForm.JSON_SCHEMA, '{"type":"object"}'), "{" + "\n" + " " * 25)


def test_a_token_that_was_not_allowed_breaks_a_guide_which_then_allows_nothing() -> None:
    guide = a_guide(GrammarForm.REGEX, "ab")
    guide.note(a_tokenizer().encode("x", add_special_tokens=False).ids[0])
    assert not guide.allowed().any()
    assert "doesn't satisfy the grammar" in guide.fault
    assert not guide.is_over


def test_tokens_beyond_those_of_the_tokenizer_are_never_allowed() -> None:
    model = Model("m", FakeNetwork(vocabulary=VOCABULARY + 77), a_tokenizer(), frozenset({end_id()}))
    compiler = Compiler.of(model)
    assert compiler is not None
    allowed = compiler.compile(Grammar(GrammarForm.REGEX, "(?s:.*)")).guide().allowed()
    assert len(allowed) == VOCABULARY + 77
    assert allowed.dtype == np.bool_
    assert not allowed[VOCABULARY:].any()


def test_a_grammar_that_turns_out_to_be_too_complex_is_a_fault() -> None:
    guide = a_narrow_compiler().compile(Grammar(GrammarForm.REGEX, "(a|b)*a(a|b){12}")).guide()
    for _ in range(40):
        if guide.fault:
            break
        follow(guide, "a")
    assert "too many states" in guide.fault
    assert not guide.allowed().any()


def test_counts_of_counts_are_a_fault_before_they_take_long() -> None:
    guide = a_guide(GrammarForm.REGEX, "(a{3000}){3000}")
    assert follow(guide, "a")
    assert not guide.allowed().any()
    assert "too many expressions" in guide.fault


def test_masks_that_take_longer_than_their_tokens_earn_are_a_fault() -> None:
    matcher = Library(a_setting()).matcher(rules_of(Grammar(GrammarForm.REGEX, "a*")))
    now = itertools.count(0.0, 0.1)
    guide = Guide(matcher, vocabulary=VOCABULARY, eos_token_ids=frozenset({end_id()}), clock=lambda: next(now))
    letters = 0
    while follow(guide, "a"):
        letters += 1
    # each takes 0.1 s for its mask and 0.1 s to be noted, and earns 0.02 s
    assert letters == 5
    assert "its masks took" in guide.fault
    assert not guide.allowed().any()
    assert not guide.is_over


def test_usual_masks_are_paid_for_by_their_tokens() -> None:
    matcher = Library(a_setting()).matcher(rules_of(Grammar(GrammarForm.REGEX, "a*")))
    now = itertools.count(0.0, 0.009)
    guide = Guide(matcher, vocabulary=VOCABULARY, eos_token_ids=frozenset({end_id()}), clock=lambda: next(now))
    assert all(follow(guide, "a") for _ in range(500))


def without_llguidance(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    return a_model()


def without_tokenizer(_: pytest.MonkeyPatch) -> Model:
    return Model("m", FakeNetwork(vocabulary=VOCABULARY), None)


def with_more_tokens_than_logits(_: pytest.MonkeyPatch) -> Model:
    return Model("m", FakeNetwork(vocabulary=100), a_tokenizer(), frozenset({end_id()}))


@pytest.mark.parametrize(
    ("make", "because"),
    [
        (without_llguidance, "pip install"),
        (without_tokenizer, "has no tokenizer.json"),
        (with_more_tokens_than_logits, "vocab size too small"),
    ],
)
def test_where_there_can_be_none_the_log_says_why(
    make: object, because: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert Compiler.of(make(monkeypatch)) is None  # type: ignore[operator]
    assert because in caplog.text


MARK = "<tool_call>"


def with_marks(*, special: bool) -> tuple[Compiler, Tokenizer]:
    tokenizer = Tokenizer.from_str(a_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken(MARK, special=special), AddedToken("[INST]", special=special)])
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    return Compiler(a_setting(tokenizer=tokenizer.to_str(), vocabulary=vocabulary)), tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("mark", [MARK, "[INST]", END])
@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (GrammarForm.CHOICE, '["MARK"]', "MARK"),
        (GrammarForm.CHOICE, '["aMARKb", "aMARKc"]', "aMARKb"),
        (GrammarForm.REGEX, r"x\QMARK\E+y?", "xMARK"),
        (GrammarForm.JSON_SCHEMA, '{"const": "MARK"}', '"MARK"'),
        (GrammarForm.JSON_SCHEMA, '{"enum": [["aMARK"]]}', '["aMARK"]'),
        (GrammarForm.RULES, 'start: "MARK" "MARK"', "MARKMARK"),
        (GrammarForm.RULES, 'root ::= "MARK" "."', "MARK."),
    ],
)
def test_a_text_in_a_grammar_that_equals_an_added_token_is_drawn_as_a_text(
    form: GrammarForm, text: str, shown: str, mark: str, *, special: bool
) -> None:
    compiler, tokenizer = with_marks(special=special)
    escaped = re.escape(mark) if form is GrammarForm.REGEX else mark
    text = text.replace(r"\QMARK\E", f"({escaped})").replace("MARK", escaped)
    guide, drawn = compiler.compile(Grammar(form, text)).guide(), list[int]()
    rng = random.Random(5)
    while len(drawn) < 60 and not guide.is_over:
        allowed = np.flatnonzero(guide.allowed()).tolist()
        assert not guide.fault
        if end_id() in allowed:
            break
        drawn.append(rng.choice([each for each in allowed if each not in (tokenizer.token_to_id(MARK), end_id())]))
        guide.note(drawn[-1])
    written = tokenizer.decode(drawn, skip_special_tokens=True)
    assert written.replace(" ", "")[: len(shown) - 1] == shown.replace("MARK", mark)[: len(shown) - 1]
    assert mark in written
    compiler.close()


@pytest.mark.parametrize(
    "rules",
    [
        f'start: {MARK} "x" {MARK}',
        f'// "{MARK}\nstart: {MARK} /x/ {MARK}',
    ],
)
def test_a_grammar_may_name_an_added_token_and_gets_that_token(rules: str) -> None:
    compiler, tokenizer = with_marks(special=False)
    guide = compiler.compile(Grammar(GrammarForm.RULES, rules)).guide()
    number = tokenizer.token_to_id(MARK)
    for token in (number, tokenizer.token_to_id("x"), number):
        assert np.flatnonzero(guide.allowed()).tolist() == [token]
        guide.note(token)
    assert guide.is_over or guide.allowed()[end_id()]
    compiler.close()

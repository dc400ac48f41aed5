"""The grammar library, llguidance (https://github.com/guidance-ai/llguidance), with the limits of one answer.

Torch-free: trials read it in a process of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from shards.nouns import Grammar, GrammarForm

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

_WHITESPACE = r"( |\n[ \t]{0,20})"
"""White space allowed between two tokens of JSON, at most once. Without a bound a small model can write white space
until the length limit; without any white space it cannot write JSON as it learned to."""

_OPTIONS: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
"""Options for JSON schemas. A schema may override them, except where an answer could then violate it."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The values of `format` that the library can hold a text to. To any other one a text need not be held.

Source: JSON Schema 2020-12, Validation, 7.2.1 and 7.2.3.
"""

MOST_CHARACTERS = 1 << 20
"""A longer grammar is refused unread."""


class CannotCompile(ValueError):
    """The grammar is wrong, too large, or uses an unsupported feature. The message is for the grammar's author."""


class Setting(msgspec.Struct, frozen=True):
    """A model's tokens, and the work that a grammar for them may cause.

    `tokenizer` is the content of tokenizer.json. `lexer_states` bounds the memory of an answer: each state takes 1 to
    2 KiB. `lexer_fuel` and `step_fuel` bound the expressions that the library makes in total and in one step: a mask
    takes at most 0.2 s with them, and 1.3 s with the library's own.
    """

    tokenizer: str
    vocabulary: int
    eos_token_ids: list[int]
    lexer_states: int = 50_000
    lexer_fuel: int = 200_000
    step_fuel: int = 50_000
    computes_ahead: bool = True


class Library:
    """Grammars for the tokens of `setting`. Raises ValueError if the library cannot read the tokenizer."""

    def __init__(self, setting: Setting) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self._limits = LLParserLimits(
            max_lexer_states=setting.lexer_states,
            initial_lexer_fuel=setting.lexer_fuel,
            step_lexer_fuel=setting.step_fuel,
            precompute_large_lexemes=setting.computes_ahead,
            verbose_errors=False,
        )
        tokenizer, self._numbers = _with_unwritable_names(setting.tokenizer)
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=setting.vocabulary, eos_token=setting.eos_token_ids or None)

    def matcher(self, rules: str) -> LLMatcher:
        """The beginning of an answer of `rules`, in the library's notation. Raises CannotCompile."""
        from llguidance import LLMatcher

        by_number = _with_numbers(rules, self._numbers)
        matcher = LLMatcher(self._tokenizer, by_number, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise CannotCompile(matcher.get_error())
        return matcher


_LARK_NAME = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?P<name><[^<>\s]+>)')
"""Comments, texts and expressions of Lark, which are passed over, and the name of a token."""


def _with_unwritable_names(tokenizer: str) -> tuple[str, dict[str, int]]:
    """The content of a tokenizer.json in which no text is an added token, and the numbers of these by their names.

    The library draws a text that leaves no choice as its tokenizer reads it. If it read a mark such as `<tool_call>` in
    it, it would refuse the mark's token as no text. So such a text is drawn in ordinary tokens.
    """
    content = json.loads(tokenizer)
    added = content.get("added_tokens") or []
    renamed = {token["content"]: f"<|\ue000{token['id']}\ue001|>" for token in added}
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(name, name): number for name, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[renamed.get(name, name), score] for name, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    content["added_tokens"] = [{**token, "content": renamed[token["content"]]} for token in added]
    return json.dumps(content), {token["content"]: token["id"] for token in added}


def _with_numbers(rules: str, numbers: Mapping[str, int]) -> str:
    """`rules` with the tokens that a grammar in Lark calls by name called by number; JSON calls none."""
    if rules.lstrip().startswith("{"):
        return rules

    def named(found: re.Match[str]) -> str:
        number = numbers.get(found["name"] or "")
        return found[0] if number is None else f"<[{number}]>"

    return _LARK_NAME.sub(named, rules)


def rules_of(grammar: Grammar) -> str:
    """`grammar` in the library's notation. Raises CannotCompile."""
    try:
        return _rules_of(grammar)
    except (ValueError, RecursionError) as error:
        raise CannotCompile(str(error)) from error


def _rules_of(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    if grammar.form is GrammarForm.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(_with_known_formats(grammar.text), overrides=_OPTIONS)
    if grammar.form is GrammarForm.REGEX:
        return LLMatcher.grammar_from_regex(_ESCAPE.sub(lambda escape: _ASCII.get(escape[0], escape[0]), grammar.text))
    if grammar.form is GrammarForm.CHOICE:
        return LLMatcher.grammar_from_lark(_one_of(json.loads(grammar.text)))
    if grammar.form is GrammarForm.RULES:
        return grammar_from("grammar", grammar.text)
    raise ValueError("this shard is older than the router and does not know the form of the grammar")


def _one_of(texts: object) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("a choice is a list of texts, and not an empty one")
    # one terminal, as a rule may have 2,000 alternatives; JSON and Lark escape strings alike
    return "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, texts))


_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
"""Classes of ASCII in a regular expression, as in ECMA-262 and XGrammar. The library means all scripts by them, but for
the `pattern` of a schema.
"""

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "default", "examples")


def _with_known_formats(schema: str) -> str:
    """`schema` without the formats that the library does not know."""
    if '"format"' not in schema:
        return schema
    read = json.loads(schema)
    _leave_out_formats(read)
    return json.dumps(read)


def _leave_out_formats(schema: object) -> None:
    if isinstance(schema, list):
        for each in schema:
            _leave_out_formats(each)
    elif isinstance(schema, dict):
        if isinstance(named := schema.get("format"), str) and named not in FORMATS:
            del schema["format"]
        for name, part in schema.items():
            if name in _SCHEMAS_BY_NAME and isinstance(part, dict):
                for each in part.values():
                    _leave_out_formats(each)
            elif name not in _DATA:
                _leave_out_formats(part)

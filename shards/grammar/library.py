"""The grammar library, llguidance (https://github.com/guidance-ai/llguidance), with the limits of one answer.

Torch-free: trials read it in a process of their own.
"""

from __future__ import annotations

import json
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
        self._tokenizer = LLTokenizer(
            setting.tokenizer, n_vocab=setting.vocabulary, eos_token=setting.eos_token_ids or None
        )

    def matcher(self, rules: str) -> LLMatcher:
        """The beginning of an answer of `rules`, in the library's notation. Raises CannotCompile."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, rules, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise CannotCompile(matcher.get_error())
        return matcher


def rules_of(grammar: Grammar) -> str:
    """`grammar` in the library's notation. Raises CannotCompile."""
    try:
        return _rules_of(grammar)
    except (ValueError, RecursionError) as error:
        raise CannotCompile(str(error)) from error


def _rules_of(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    if grammar.form is GrammarForm.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_OPTIONS)
    if grammar.form is GrammarForm.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
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

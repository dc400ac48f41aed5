"""Grammars for one model's tokens, by llguidance (https://github.com/guidance-ai/llguidance), which is optional."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from shards.grammar.guide import Guide
from shards.nouns import Grammar, GrammarForm

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from shards.model import Model

_log = logging.getLogger(__name__)

_WHITESPACE = r"( |\n[ \t]{0,20})"
"""White space allowed between two tokens of JSON, at most once. Without a bound a small model can write white space
until the length limit; without any white space it cannot write JSON as it learned to."""

_OPTIONS: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
"""Options for JSON schemas. A schema may override them, except where an answer could then violate it."""

_MOST_LEXER_STATES = 50_000
"""Limit per answer, 1 to 2 KiB each; the library's own limit is five times that."""


class CannotCompile(ValueError):
    """The grammar is wrong, too large, or uses an unsupported feature. The message is for the grammar's author."""


class Compiled:
    """A grammar for one model's tokens."""

    def __init__(self, matcher: LLMatcher, *, vocabulary: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._vocabulary, self._eos_token_ids = matcher, vocabulary, eos_token_ids

    def guide(self) -> Guide:
        """A guide at the beginning of an answer."""
        return Guide(self._matcher.deep_copy(), vocabulary=self._vocabulary, eos_token_ids=self._eos_token_ids)


class Compiler:
    """Compiles grammars for the tokens of `tokenizer`."""

    def __init__(
        self, tokenizer: LLTokenizer, limits: LLParserLimits, *, vocabulary: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._vocabulary, self._eos_token_ids = vocabulary, eos_token_ids

    def __repr__(self) -> str:
        return f"Compiler({self._vocabulary} tokens)"

    @classmethod
    def of(cls, model: Model) -> Compiler | None:
        """The compiler for `model`; None, with the reason in the log, if the model cannot have one."""
        try:
            from llguidance import LLParserLimits, LLTokenizer
        except ImportError:
            _log.warning("no structured output: llguidance is not installed; pip install 'pointsman[shard]' brings it")
            return None
        if model.tokenizer is None:
            _log.warning("no structured output: %s has no tokenizer.json", model.name)
            return None
        limits = LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)
        try:
            tokenizer = LLTokenizer(
                model.tokenizer.to_str(), n_vocab=model.vocabulary, eos_token=sorted(model.eos_token_ids) or None
            )
        except ValueError as error:
            _log.warning("no structured output: llguidance cannot read the tokenizer of %s: %s", model.name, error)
            return None
        return cls(tokenizer, limits, vocabulary=model.vocabulary, eos_token_ids=model.eos_token_ids)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile `grammar` for these tokens, in up to about a second of one core. Raises CannotCompile."""
        from llguidance import LLMatcher

        try:
            rules = _rules_of(grammar)
        except ValueError as error:
            raise CannotCompile(str(error)) from error
        matcher = LLMatcher(self._tokenizer, rules, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise CannotCompile(matcher.get_error())
        return Compiled(matcher, vocabulary=self._vocabulary, eos_token_ids=self._eos_token_ids)


def _rules_of(grammar: Grammar) -> str:
    """`grammar` in the notation of llguidance. Raises ValueError."""
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
    # JSON and Lark escape strings alike
    return "start: " + " | ".join(map(json.dumps, texts))

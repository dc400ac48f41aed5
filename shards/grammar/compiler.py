"""Grammars for one model's tokens. Each is tried in another process before it is compiled in this one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shards.grammar.guide import Guide
from shards.grammar.library import CannotCompile, Library, Setting
from shards.grammar.trials import Trials
from shards.nouns import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from shards.model import Model

_log = logging.getLogger(__name__)

__all__ = ["CannotCompile", "Compiled", "Compiler"]


class Compiled:
    """A grammar for one model's tokens."""

    def __init__(self, matcher: LLMatcher, setting: Setting) -> None:
        self._matcher, self._vocabulary = matcher, setting.vocabulary
        self._eos_token_ids = frozenset(setting.eos_token_ids)

    def guide(self) -> Guide:
        """A guide at the beginning of an answer."""
        return Guide(self._matcher.deep_copy(), vocabulary=self._vocabulary, eos_token_ids=self._eos_token_ids)


class Compiler:
    """Compiles grammars for the tokens of `setting`. Raises ValueError if the library cannot read the tokenizer."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._library = setting, Library(setting)
        self._trials = Trials(setting)

    def __repr__(self) -> str:
        return f"Compiler({self._setting.vocabulary} tokens)"

    @classmethod
    def of(cls, model: Model) -> Compiler | None:
        """The compiler for `model`; None, with the reason in the log, if the model cannot have one."""
        if model.tokenizer is None:
            _log.warning("no structured output: %s has no tokenizer.json", model.name)
            return None
        try:
            return cls(Setting(model.tokenizer.to_str(), model.vocabulary, sorted(model.eos_token_ids)))
        except ImportError:
            _log.warning("no structured output: llguidance is not installed; pip install 'pointsman[shard]' brings it")
        except ValueError as error:
            _log.warning("no structured output: llguidance cannot read the tokenizer of %s: %s", model.name, error)
        return None

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile `grammar` for these tokens, in at most some seconds of one core. Raises CannotCompile."""
        return Compiled(self._library.matcher(self._trials.rules_of(grammar)), self._setting)

    def close(self) -> None:
        """Compile nothing more."""
        self._trials.close()

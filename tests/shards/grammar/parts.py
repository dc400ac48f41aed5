"""Schemas at random, and the bundled model's tokens to write them in."""

from __future__ import annotations

import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from shards.bundled import weights
from shards.exec.fake import FakeNetwork
from shards.grammar.compiler import Compiled, Compiler
from shards.grammar.library import Setting
from shards.model import Model
from shards.nouns import Grammar

TOKENIZER: Path = weights() / "tokenizer.json"
END = "<|end|>"
VOCABULARY = 1536


@cache
def a_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def end_id() -> int:
    return int(a_tokenizer().token_to_id(END))


def a_model() -> Model:
    return Model("m", FakeNetwork(vocabulary=VOCABULARY), a_tokenizer(), frozenset({end_id()}))


@cache
def a_compiler() -> Compiler:
    """One for all tests, as its process starts only once."""
    compiler = Compiler.of(a_model())
    assert compiler is not None
    return compiler


class SlowCompiler(Compiler):
    """Compiles nothing before it may, and notes what it was asked for."""

    def __init__(self) -> None:
        self._real = a_compiler()
        self.may_go_on = threading.Event()
        self.asked: list[str] = []

    def compile(self, grammar: Grammar) -> Compiled:
        self.asked.append(grammar.text)
        assert self.may_go_on.wait(10)
        return self._real.compile(grammar)

    def close(self) -> None:
        """The real one is for other tests too."""


def a_setting(**changes: Any) -> Setting:
    """The bundled model's tokens, with the usual limits except for `changes`."""
    return replace(Setting(a_tokenizer().to_str(), VOCABULARY, [end_id()]), **changes)


def a_narrow_compiler() -> Compiler:
    """A compiler of grammars that become too complex soon."""
    return Compiler(a_setting(lexer_states=20, computes_ahead=False))


def a_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A tokenizer with the characters that most schemas need, for short answers."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "const"]
    kind = rng.choice([*kinds, *(["object", "array", "anyOf"] * 3 if depth else [])])
    if kind == "object":
        names = rng.sample(["name", "Ort", "größe", "n 1", "x", "is_it"], rng.randint(1, 4))
        required = rng.sample(names, rng.randint(0, len(names)))
        properties = {name: a_schema(rng, depth - 1) for name in names}
        return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": kind,
            "items": a_schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    if kind == "anyOf":
        return {"anyOf": [a_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    leaves: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)},
        "integer": {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": rng.choice([0.5, 3, 1000])},
        "enum": {"enum": rng.sample(["a", "b c", 'q"', 1, 2.5, None, True, [1, "x"]], rng.randint(1, 5))},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(no|yes)-[0-9]{2}$", "^x?y+z$"])},
        "const": {"const": rng.choice(["Köln", 7, {"a": [None]}])},
    }
    return leaves.get(kind, {"type": kind})

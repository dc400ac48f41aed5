"""Grammars that would crash, stop or fill a shard end in another process; the shard refuses them, and goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shards.grammar.library import MOST_CHARACTERS, CannotCompile
from shards.grammar.trials import Trials
from shards.nouns import Grammar, GrammarForm
from tests.shards.grammar.parts import a_compiler, a_setting

DEEP = "nests too deeply"
SLOW = "takes more than"


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    trials = Trials(a_setting())
    yield trials
    trials.close()


def a_chain(rule: Callable[[int], str], last: str, first: str = "start: r0\n", *, rules: int = 3000) -> str:
    return first + "".join(rule(number) for number in range(rules)) + last


def lark(rule: Callable[[int], str], *, rules: int = 3000) -> Grammar:
    return Grammar(GrammarForm.RULES, a_chain(rule, f'r{rules}: "a"\n', rules=rules))


def references(schema: Callable[[str], object], *, links: int = 3000) -> Grammar:
    definitions = {f"d{number}": schema(f"#/$defs/d{number + 1}") for number in range(links)}
    whole = {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"type": "integer"}}}
    return Grammar(GrammarForm.JSON_SCHEMA, json.dumps(whole))


BOMBS = {
    "a chain of rules": (lark(lambda n: f"r{n}: r{n + 1}\n"), DEEP),
    "a longer chain": (lark(lambda n: f"r{n}: r{n + 1}\n", rules=30_000), DEEP),
    "a chain with a token each": (lark(lambda n: f'r{n}: "a" r{n + 1}\n'), DEEP),
    "a chain with alternatives": (lark(lambda n: f'r{n}: r{n + 1} | "b{n}"\n'), DEEP),
    "a chain of options": (lark(lambda n: f"r{n}: r{n + 1}?\n"), DEEP),
    "a doubling chain": (lark(lambda n: f"r{n}: r{n + 1} r{n + 1}\n"), DEEP),
    "a circle of rules": (
        Grammar(GrammarForm.RULES, a_chain(lambda n: f"r{n}: r{n + 1}\n", "r3000: r0\n")),
        DEEP,
    ),
    "a chain of terminals": (
        Grammar(
            GrammarForm.RULES, a_chain(lambda n: f"T{n}: T{n + 1}\n", 'T30000: "a"\n', "start: T0\n", rules=30_000)
        ),
        DEEP,
    ),
    "a chain of references": (references(lambda link: {"$ref": link}), DEEP),
    "a chain of properties": (
        references(lambda link: {"type": "object", "properties": {"a": {"$ref": link}}, "required": ["a"]}),
        DEEP,
    ),
    "a chain of anyOf": (references(lambda link: {"anyOf": [{"$ref": link}, {"type": "null"}]}), DEEP),
    "a chain of allOf": (references(lambda link: {"allOf": [{"$ref": link}, {"type": "integer"}]}), DEEP),
    "intersections that never end": (
        Grammar(GrammarForm.RULES, "start: T\nT: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(1, 30)) + "\n"),
        SLOW,
    ),
    "optional letters": (
        Grammar(GrammarForm.REGEX, "[a-z]?" * 30_000 + "[a-z]" * 30_000),
        "takes more than|too big|fuel",
    ),
    "doubled terminals": (
        Grammar(
            GrammarForm.RULES, a_chain(lambda n: f"T{n}: T{n + 1} T{n + 1}\n", 'T30: "a"\n', "start: T0\n", rules=30)
        ),
        "too big",
    ),
    "nested parentheses": (Grammar(GrammarForm.RULES, "start: " + "(" * 60_000 + '"a"' + ")" * 60_000), "nested"),
    "nested parentheses of GBNF": (
        Grammar(GrammarForm.RULES, "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
        "depth",
    ),
    "parentheses that stay open": (Grammar(GrammarForm.RULES, "root ::= " + "(" * 30_000 + "a"), "GBNF"),
    "a terminal that stays open": (Grammar(GrammarForm.RULES, 'start: / "test"\n'), "lexer error"),
    "a reference to itself": (Grammar(GrammarForm.JSON_SCHEMA, '{"$ref": "#"}'), "no answer fits"),
    "more text than is read": (Grammar(GrammarForm.REGEX, "a" * (MOST_CHARACTERS + 1)), "characters"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_no_shard_survives_is_refused_with_its_reason(name: str, trials: Trials) -> None:
    grammar, because = BOMBS[name]
    with pytest.raises(CannotCompile, match=because):
        trials.rules_of(grammar)
    assert trials.rules_of(Grammar(GrammarForm.REGEX, "a")), "the next grammar is not concerned"


FINE = {
    "a recursive schema": Grammar(
        GrammarForm.JSON_SCHEMA,
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}',
    ),
    "left recursion": Grammar(GrammarForm.RULES, 'root ::= root "a" | "b"'),
    "a chain of 100 rules": lark(lambda n: f"r{n}: r{n + 1}\n", rules=100),
    "a chain of 100 references": references(lambda link: {"$ref": link}, links=100),
    "3,000 values": Grammar(GrammarForm.JSON_SCHEMA, json.dumps({"enum": [f"value {n}" for n in range(3_000)]})),
    "3,000 choices": Grammar(GrammarForm.CHOICE, json.dumps([f"choice {n}" for n in range(3_000)])),
    "a long word": Grammar(GrammarForm.REGEX, "a" * 3_000),
    "1,000 required properties": Grammar(
        GrammarForm.JSON_SCHEMA,
        json.dumps(
            {
                "type": "object",
                "properties": {f"p{n}": {"type": "integer"} for n in range(1_000)},
                "required": [f"p{n}" for n in range(1_000)],
            }
        ),
    ),
    "at least four dashes": Grammar(GrammarForm.RULES, 'root ::= "-"{4,} "x"'),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_large_and_harmless_is_compiled(name: str) -> None:
    assert a_compiler().compile(FINE[name]).guide().allowed().any()


def test_a_process_that_was_killed_is_replaced(trials: Trials) -> None:
    grammar = Grammar(GrammarForm.REGEX, "a")
    before = trials.rules_of(grammar)
    killed = trials.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert trials.rules_of(grammar) == before
    assert trials.pid != killed


def test_a_process_that_gives_no_answer_is_ended_and_the_grammar_refused() -> None:
    trials = Trials(a_setting(), most_s=1.0)
    trials.rules_of(Grammar(GrammarForm.REGEX, "a"))
    stopped = trials.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    # its successor answers
    assert trials.rules_of(Grammar(GrammarForm.REGEX, "b"))
    assert not Path(f"/proc/{stopped}").exists()
    trials.close()
    with pytest.raises(CannotCompile, match="ended"):
        trials.rules_of(Grammar(GrammarForm.REGEX, "a"))


def test_the_process_ends_with_its_trials() -> None:
    trials = Trials(a_setting())
    assert trials.pid is None, "none starts before it is needed"
    trials.rules_of(Grammar(GrammarForm.REGEX, "a"))
    pid = trials.pid
    del trials
    assert not Path(f"/proc/{pid}").exists()

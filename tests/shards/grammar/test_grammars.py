from __future__ import annotations

from shards.grammar.compiler import CannotCompile, Compiled
from shards.grammar.grammars import Grammars
from shards.nouns import Grammar, GrammarForm
from tests.shards.grammar.parts import SlowCompiler


def a_grammar(number: int) -> Grammar:
    return Grammar(GrammarForm.REGEX, f"a{{{number}}}")


def landed(grammars: Grammars) -> dict[object, object]:
    """The results of all awaited grammars."""
    found: dict[object, object] = {}
    while grammars.is_awaited:
        found.update(grammars.answers())
    return found


def test_no_request_waits_and_requests_for_the_same_grammar_share_one_compilation() -> None:
    compiler = SlowCompiler()
    grammars = Grammars(compiler)
    assert grammars.ask("one", a_grammar(1))
    assert grammars.ask("two", a_grammar(1))
    assert (grammars.answers(), grammars.is_awaited) == ([], True)
    compiler.may_go_on.set()
    found = landed(grammars)
    assert isinstance(found["one"], Compiled)
    assert found["one"] is found["two"]
    assert grammars.ask("three", a_grammar(1))
    assert landed(grammars)["three"] is found["one"]
    assert len(compiler.asked) == 1
    grammars.close()


def test_the_oldest_is_forgotten_and_one_that_is_not_compiled_yet_never() -> None:
    compiler = SlowCompiler()
    grammars = Grammars(compiler, capacity=2)
    assert grammars.ask("one", a_grammar(1))
    assert grammars.ask("two", a_grammar(2))
    assert not grammars.ask("three", a_grammar(3)), "there is no room for a third that waits"
    compiler.may_go_on.set()
    assert landed(grammars).keys() == {"one", "two"}
    for key, number in (("again", 1), ("three", 3), ("one", 1), ("two", 2)):
        assert grammars.ask(key, a_grammar(number))
        landed(grammars)
    # 1 was asked for after 2, so that 2 gave way to 3
    assert compiler.asked == ["a{1}", "a{2}", "a{3}", "a{2}"]
    grammars.close()


def test_grammars_that_cannot_be_compiled_are_cached_too_and_cancelled_requests_get_no_error() -> None:
    compiler = SlowCompiler()
    grammars, wrong = Grammars(compiler), Grammar(GrammarForm.REGEX, "(")
    compiler.may_go_on.set()
    for key in ("one", "two"):
        grammars.ask(key, wrong)
        assert isinstance(landed(grammars)[key], CannotCompile)
    assert len(compiler.asked) == 1
    grammars.ask("gone", a_grammar(1))
    grammars.leave("gone")
    assert not grammars.is_awaited
    grammars.close()


def test_domains_take_turns_and_none_keeps_the_others_waiting() -> None:
    compiler = SlowCompiler()
    grammars = Grammars(compiler, most_of_one=4)
    asked = [grammars.ask(number, a_grammar(number), domain="many") for number in range(1, 7)]
    # the first one is being compiled, and waits no more
    assert asked[:4] == [True] * 4
    assert asked[-1] is False
    assert grammars.ask("other", a_grammar(9), domain="other")
    compiler.may_go_on.set()
    landed(grammars)
    assert compiler.asked.index("a{9}") <= 2
    grammars.close()


def test_without_a_compiler_there_is_nothing_to_ask_for() -> None:
    assert not Grammars(None).can_compile

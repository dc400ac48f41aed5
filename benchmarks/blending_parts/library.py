"""Prompts of several documents in which one document gives the meaning of another one's words.

A register of names says for which person a code name stands, and records state facts with code names in place of
persons, each code name once. Two registers may give one code name to two persons, so the answer depends on the register
in the prompt: KV of a record that was computed behind another register, or behind none, can give a wrong answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from shards.bundled import documents
from shards.bundled.documents import (
    COLOURS,
    FIRST_NAMES,
    GOODS,
    LAST_NAMES,
    LETTERS,
    MATERIALS,
    REGIONS,
    TITLES,
    Question,
    Split,
)

PEOPLE = ("keeper", "builder", "owner")
OTHERS = ("access code", "serial number", "depth", "height", "weight")

ALIASES = tuple(dict.fromkeys((*LETTERS, *COLOURS, *GOODS, *MATERIALS)))

HEADING = "Documents:\n\n"


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence of a record; `alias` is the code name in it, empty for a fact that needs no register."""

    question: Question
    alias: str


@dataclass(frozen=True, slots=True)
class Paper:
    """A document as the router writes it: a register with `names` (code name -> person), or a record with `facts`."""

    text: str
    facts: tuple[Fact, ...] = ()
    names: tuple[tuple[str, str], ...] = ()


def register(rng: random.Random, aliases: tuple[str, ...]) -> Paper:
    """A register of these code names, each for a person of its own."""
    firsts, lasts = rng.sample(FIRST_NAMES, len(aliases)), rng.sample(LAST_NAMES, len(aliases))
    names = tuple((alias, f"{first} {last}") for alias, first, last in zip(aliases, firsts, lasts, strict=True))
    title = f"Code names of the {rng.choice(REGIONS)} district"
    return Paper(_written(rng, title, ["Names:", *(f"{alias} {person}." for alias, person in names)]), names=names)


def record(rng: random.Random, aliases: tuple[str, ...], things: list[str], others: int) -> Paper:
    """A record with one fact for each of `aliases`, which stand for persons, and `others` that need no register.

    The things that it is about are removed from `things`.
    """
    facts: list[Fact] = []
    for alias in aliases:
        question = documents.ask(rng.choice(PEOPLE), things.pop(), rng)
        said = f"{question.answer.partition(' is ')[0]} is {alias}."
        facts.append(Fact(replace(question, answer=said, needle=alias), alias))
    facts += [Fact(documents.ask(rng.choice(OTHERS), things.pop(), rng), "") for _ in range(others)]
    rng.shuffle(facts)
    title = f"{rng.choice(TITLES)} of the {rng.choice(REGIONS)} district"
    return Paper(_written(rng, title, [fact.question.answer for fact in facts]), tuple(facts))


def things(rng: random.Random, split: Split) -> list[str]:
    """All things of the split, shuffled."""
    every = list(documents.entities(split))
    rng.shuffle(every)
    return every


def questions(papers: list[Paper]) -> list[tuple[Question, bool]]:
    """All questions that `papers` answer, with their answers, and whether they need a register."""
    names = {alias: person for paper in papers for alias, person in paper.names}
    return [
        (_resolved(fact, names), bool(fact.alias))
        for paper in papers
        for fact in paper.facts
        if not fact.alias or fact.alias in names
    ]


def prompt(papers: list[Paper], question: str) -> str:
    """The user's message: the documents as the router writes them, then the question."""
    return f"{HEADING}{''.join(paper.text for paper in papers)}Question: {question}"


def _resolved(fact: Fact, names: dict[str, str]) -> Question:
    if not fact.alias:
        return fact.question
    person = names[fact.alias]
    stem = fact.question.answer.partition(" is ")[0]
    return replace(fact.question, answer=f"{stem} is {person}.", needle=person)


def _written(rng: random.Random, title: str, sentences: list[str]) -> str:
    number = "".join(rng.choices("0123456789", k=4))
    return f"Document {number}: {title}\n{' '.join(sentences)}\n\n"

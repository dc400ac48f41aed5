"""The format that an answer must have, from the fields of OpenAI's dialect and vLLM's extensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from backends.openai.answer_schema import schema_in
from policies.errors import InvalidRequest
from policies.nouns import Grammar, Sampling
from router.protocols.openai.fields import Common, ResponseFormat, StructuredOutputs

ANY_OBJECT = '{"type":"object"}'

_OLDER_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FORMAT_FIELDS = frozenset({"response_format", "structured_outputs", "regex", "ebnf", *_OLDER_FIELDS})
"""The fields that can ask for a format."""


def grammar_in(fields: Common) -> Grammar | None:
    """The grammar that `fields` ask for; None if any answer will do. Raises InvalidRequest if they ask for several.

    Its text is empty if only backends can read it.
    """
    grammars = list[Grammar]()
    if fields.response_format is not None and fields.response_format.type != "text":
        grammars.append(_of_format(fields.response_format))
    if fields.structured_outputs is not None:
        grammars += _of_vllm(fields.structured_outputs, "structured_outputs.")
    older = (fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    if older != (None, None, None, None):
        grammars += _of_vllm(StructuredOutputs(*older), "guided_")
    if fields.regex is not None:
        grammars.append(Grammar("regex", fields.regex, "regex"))
    if fields.ebnf is not None:
        grammars.append(Grammar("rules", fields.ebnf, "ebnf"))
    if len(grammars) > 1:
        message = f"`{grammars[0].field}` and `{grammars[1].field}` both fix the answer's format"
        raise InvalidRequest(message, hint="set one of them", param=grammars[1].field)
    return grammars[0] if grammars else None


def from_field(field: str, sampling: Sampling) -> Sampling:
    """`sampling` with `field` of another dialect, instead of `response_format`, as the origin of its grammar."""
    grammar = sampling.grammar
    if grammar is None or grammar.field != "response_format":
        return sampling
    return replace(sampling, grammar=replace(grammar, field=field))


def _of_format(shape: ResponseFormat) -> Grammar:
    if shape.type in ("json_object", "json_schema"):
        schema = _written(schema_in(asdict(shape)))
        return Grammar("json_schema", schema or (ANY_OBJECT if shape.type == "json_object" else ""), "response_format")
    return Grammar(shape.type, "", "response_format")


def _of_vllm(given: StructuredOutputs, prefix: str) -> Iterator[Grammar]:
    if given.json is not None:
        yield Grammar("json_schema", _written(given.json), f"{prefix}json")
    if given.json_object:
        yield Grammar("json_schema", ANY_OBJECT, f"{prefix}json_object")
    if given.regex is not None:
        yield Grammar("regex", given.regex, f"{prefix}regex")
    if given.choice is not None:
        yield Grammar("choice", _written(given.choice), f"{prefix}choice")
    if given.grammar is not None:
        yield Grammar("rules", given.grammar, f"{prefix}grammar")
    if given.structural_tag is not None:
        yield Grammar("structural_tag", "", f"{prefix}structural_tag")


def _written(value: Any) -> str:
    """`value` as JSON text with its members in their order, which answers have to follow."""
    return "" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()

"""What an answer must be, as OpenAI's dialect and vLLM's extensions of it say that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from policies.errors import InvalidRequest
from policies.nouns import Grammar, Sampling
from router.protocols.openai.fields import Common, ResponseFormat, StructuredOutputs

ANY_OBJECT = '{"type":"object"}'


def grammar_in(fields: Common) -> Grammar | None:
    """The grammar that `fields` ask for; None where any answer will do. Raises InvalidRequest if it is several.

    Its text is empty where only a backend that knows more than we do can read it.
    """
    said = list(_all_in(fields))
    if len(said) > 1:
        message = f"`{said[0].field}` and `{said[1].field}` both say what the answer must be"
        raise InvalidRequest(message, hint="say one of them", param=said[1].field)
    return said[0] if said else None


def said_as(field: str, sampling: Sampling) -> Sampling:
    """`sampling`, where `field` of another dialect is what became `response_format`."""
    grammar = sampling.grammar
    if grammar is None or grammar.field != "response_format":
        return sampling
    return replace(sampling, grammar=replace(grammar, field=field))


def _all_in(fields: Common) -> Iterator[Grammar]:
    if fields.response_format is not None and fields.response_format.type != "text":
        yield _of_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield from _of_vllm(fields.structured_outputs, "structured_outputs.")
    older = (fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    if older != (None, None, None, None):
        yield from _of_vllm(StructuredOutputs(*older), "guided_")


def _of_format(shape: ResponseFormat) -> Grammar:
    if shape.type == "json_object":
        return Grammar("json_schema", ANY_OBJECT, "response_format")
    if shape.type == "json_schema":
        schema = shape.json_schema.get("schema") if isinstance(shape.json_schema, dict) else None
        return Grammar("json_schema", _written(schema), "response_format")
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
    """`value` as JSON text, its members in their order: answers have them in it too."""
    return "" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()

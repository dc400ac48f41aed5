"""The bodies that cost a router most, found by a search over shapes of bodies.

    python benchmarks/worst_bodies.py [--rounds 2000] [--seed 1]

Each body is one field of an endpoint with very many equal or numbered elements; the search draws the field and the
element, and changes the best ones. Printed are the bodies with the most memory for each of their bytes (tracemalloc,
parsed as the router does) and with the longest time for each, and the memory beside the router's own estimate.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends.http.exchange import encoded
from policies.errors import ExpectedError
from router.call.bodies import cost_in_turns
from router.protocols.dialect import decode
from router.protocols.dialects import DIALECTS
from router.text.turns import at_once

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
_USER = '{"role":"user","content":"a"}'


class Field(NamedTuple):
    """A place in the body of an endpoint, which goes where # is."""

    path: str
    body: str


class Shape(NamedTuple):
    """A body with many elements in `field`. In an element, % is its number in hexadecimal; others are repeated.

    An element without a comma between two of them is a text.
    """

    field: Field
    element: str
    joined_by: str = ","

    def of(self, size: int) -> bytes:
        """The body, of about `size` bytes."""
        each = len((self.element + self.joined_by).encode()) + (4 if "%" in self.element else 0)
        elements = (self.element.replace("%", f"{number:x}") for number in range(max(1, size // max(1, each))))
        return self.field.body.replace("#", self.joined_by.join(elements)).encode()

    def __str__(self) -> str:
        return f"{self.field.path} {self.field.body.replace('#', f'{self.element}{self.joined_by}...')}"


def _chat(more: str = "", messages: str = _USER) -> Field:
    return Field(CHAT, f'{{"model":"m","messages":[{messages}]{more}}}')


def _claude(more: str = "", messages: str = _USER) -> Field:
    return Field(MESSAGES, f'{{"model":"m","max_tokens":1,"messages":[{messages}]{more}}}')


FIELDS: Mapping[str, Field] = {
    "messages": _chat(messages="#"),
    "parts": _chat(messages='{"role":"user","content":[#]}'),
    "text": _chat(messages='{"role":"user","content":"#"}'),
    "calls": _chat(messages='{"role":"assistant","tool_calls":[#]}'),
    "arguments": _chat(messages='{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[#]"}}]}'),
    "tools": _chat(',"tools":[#]'),
    "properties": _chat(',"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{#}}}}]'),
    "stop": _chat(',"stop":[#]'),
    "logit_bias": _chat(',"logit_bias":{#}'),
    "metadata": _chat(',"metadata":{#}'),
    "variables": _chat(',"chat_template_kwargs":{"x":[#]}'),
    "documents": _chat(',"documents":[#]'),
    "schema": _chat(',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"x":[#]}}}'),
    "other": _chat(',"x":[#]'),
    "members": _chat(",#"),
    "prompts": Field(TEXT, '{"model":"m","prompt":[#]}'),
    "prompt": Field(TEXT, '{"model":"m","prompt":"#"}'),
    "Claude's messages": _claude(messages="#"),
    "Claude's blocks": _claude(messages='{"role":"user","content":[#]}'),
    "Claude's turns": _claude(messages='{"role":"assistant","content":[#]}'),
    "Claude's tools": _claude(',"tools":[#]'),
    "Claude's system": _claude(',"system":[#]'),
    "items": Field(RESPONSES, '{"model":"m","input":[#]}'),
    "item's parts": Field(RESPONSES, '{"model":"m","input":[{"role":"user","content":[#]}]}'),
    "items' tools": Field(RESPONSES, '{"model":"m","input":"a","tools":[#]}'),
    "texts": Field(EMBEDDINGS, '{"model":"m","input":[#]}'),
    "ranked": Field(RERANK, '{"model":"m","query":"a","documents":[#]}'),
}

ELEMENTS = (
    *("{}", "[]", "[1]", "[[]]", "0", "999", "0.5", "1e9", "null"),
    *('""', '"a"', '"%"', '{"a":1}', '{"%":1}', '{"a":{}}'),
    *('"%":1', '"%":{}', '"%":""', '"%":[]', '"\\\\u0041"', '{\\"a\\":1}', '\\"a\\"'),
    *(_USER, '{"role":"","content":""}', '{"role":"user","content":[{"type":"text","text":""}]}'),
    *('{"type":"text","text":""}', '{"type":"text","text":"","x":1}', '{"type":"file","file":{}}'),
    '{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}',
    '{"type":"function","function":{"name":"f"}}',
    '{"type":"function","function":{"name":"f","parameters":{}}}',
    *('{"function":{"name":"","arguments":"{}"}}', '{"function":{"name":"f","arguments":"[[],[]]"}}'),
    *('{"name":"a"}', '{"name":"a","input_schema":{}}', '{"type":"function","name":"f"}'),
    *('{"type":"text","text":"","cache_control":{}}', '{"type":"tool_use","id":"a","name":"b"}'),
    *('{"type":"tool_result","tool_use_id":"a"}', '{"type":"thinking","thinking":"a"}'),
    *('{"type":"input_text","text":""}', '{"type":"function_call","call_id":"a"}'),
    *('{"type":"function_call_output","call_id":"a","output":""}', '{"type":"reasoning","summary":[]}'),
    '{"text":""}',
)
_EMOJI = "\U0001f600"
TEXTS = ("a ", _EMOJI, f"{_EMOJI} aaaaaaaaaaaa", "\u4e00", "\u00e9", "\\n", "\\u0041", "\\ud83d\\ude00", '\\"')

WORST = {
    "tools of one name": Shape(FIELDS["Claude's tools"], '{"name":"a"}'),
    "parts that are texts": Shape(FIELDS["parts"], '""'),
    "documents": Shape(FIELDS["documents"], "{}"),
    "items": Shape(FIELDS["items' tools"], '{"type":"function","name":"f"}'),
    "calls of tools": Shape(FIELDS["Claude's turns"], '{"type":"tool_use","id":"a","name":"b"}'),
    "arguments": Shape(FIELDS["arguments"], "{}"),
    "messages": Shape(FIELDS["messages"], _USER),
    "logit_bias": Shape(FIELDS["logit_bias"], '"%":1'),
    "token ids": Shape(FIELDS["prompts"], "999"),
    "empty lists": Shape(FIELDS["other"], "[]"),
    "text beyond 16 bits": Shape(FIELDS["text"], "\U0001f600 aaaaaaaaaaaa", ""),
    "escapes": Shape(FIELDS["text"], "\\n", ""),
}
"""The worst that the search has found, of each kind."""


class Cost(NamedTuple):
    """Of one body: its bytes, the peak of its memory, the router's estimate, and the seconds to parse it."""

    bytes: int
    peak: int
    estimate: int
    seconds: float


def cost_of(path: str, body: bytes) -> Cost:
    """The cost of parsing `body` for `path`, and of sending it on."""
    estimate = at_once(cost_in_turns(body)).size
    began = time.perf_counter()
    _parse(path, body)
    seconds = time.perf_counter() - began
    tracemalloc.start()
    try:
        _parse(path, body)
        return Cost(len(body), tracemalloc.get_traced_memory()[1] + len(body), estimate, seconds)
    finally:
        tracemalloc.stop()


def _parse(path: str, body: bytes) -> None:
    try:
        ask = DIALECTS[path].parse(decode(body), {})
    except ExpectedError:
        return
    assert encoded(ask.bodies[0])


def mutated(shape: Shape, rng: random.Random) -> Shape:
    """`shape` with another field, another element, or two of them joined."""
    draw = rng.randrange(4)
    if draw == 0:
        return shape._replace(field=rng.choice(list(FIELDS.values())))
    if draw == 1:
        return Shape(shape.field, rng.choice(TEXTS) * rng.randrange(1, 4), "")
    if draw == 2 and len(shape.element) < 200:
        return Shape(shape.field, f"{shape.element},{rng.choice(ELEMENTS)}")
    return Shape(shape.field, rng.choice(ELEMENTS))


def search(rounds: int, rng: random.Random, size: int = 64 * 2**10) -> dict[Shape, Cost]:
    """The costs of the shapes that were tried: half of them are drawn, half are changes of one of the best ten."""
    found: dict[Shape, Cost] = {}
    for number in range(rounds):
        if number % 2 or len(found) < 20:
            shape = Shape(rng.choice(list(FIELDS.values())), rng.choice(ELEMENTS))
        else:
            by = rng.choice((_memory, _seconds, _excess))
            shape = mutated(rng.choice(sorted(found, key=lambda one: by(found[one]))[-10:]), rng)
        if shape not in found:
            found[shape] = cost_of(shape.field.path, shape.of(size))
    return found


def _memory(cost: Cost) -> float:
    return cost.peak / cost.bytes


def _seconds(cost: Cost) -> float:
    return cost.seconds / cost.bytes


def _excess(cost: Cost) -> float:
    return cost.peak / cost.estimate


def main() -> None:
    """Run the command line."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rounds", type=int, default=2000, help="how many bodies to try; default: 2000")
    reader.add_argument("--seed", type=int, default=1, help="of the search; default: 1")
    options = reader.parse_args()
    found = search(options.rounds, random.Random(options.seed))
    for name, by in (("memory", _memory), ("time", _seconds), ("memory beside the estimate", _excess)):
        print(f"\nmost {name}:")
        for shape in sorted(found, key=lambda one: by(found[one]))[:-9:-1]:
            cost = found[shape]
            print(
                f"{_memory(cost):6.1f} bytes and {_seconds(cost) * 2**20 * 1e3:6.0f} ms/MiB, "
                f"{_excess(cost):5.2f} of the estimate: {json.dumps(str(shape), ensure_ascii=False)[:150]}"
            )


if __name__ == "__main__":
    main()

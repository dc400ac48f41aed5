"""Compares our counts of prompt tokens with the engine's: with `usage.prompt_tokens`, request by request, and our ids
with those that it reports.

The requests are of every kind that changes what a template prints: chats, tools and their results, Chinese, JSON, code,
many turns, parts, prompts to be continued, variables, documents, texts, token ids and prompts that are cut. They go
through a router in front of a vLLM that runs already, with the checkpoint (and the template) that it was started with.

    python benchmarks/token_counts.py --url http://127.0.0.1:8000 --tokenizer DIR [--chat-template FILE]
                                      [--requests 500] [--seed 1] [--source tokenizer|engine]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import aiohttp

from policies.sla.parse import parse
from router.protocols.openai.request import CHAT_PATH, COMPLETION_PATH, chat_ask, completion_ask
from router.start.app import Router
from router.text.token_ids import unpack

MODEL = "pointsman-reader"
SLA = """
classes: {{chat: {{}}}}
tenants: {{any: {{anonymous: true}}}}
pools: {{engine: {pool}}}
rules: [{rules}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""

_SENTENCE = "the red crane lifts eleven crates; who signed for gate 42? It's 3.5 km – naïve, über-long, 100 % sure…"
_WORDS = _SENTENCE.split()
_CHINESE = "请根据下面的文件回答问题：北门的管理员是谁？第四十二号仓库存放着什么货物，重量是多少公斤。"
_CODE = """def f(x: int) -> dict[str, int]:
\treturn {
        'a': x ** 2,  # squares
    }


if __name__ == '__main__':
    print(f(7))
"""
_MARKS = ("<|end|>", "<|assistant|>", "<|bos|>", "<tool_call>", " \n\n ", "\u200b", "😀", "\ttab\r\n", "")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where? é"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
            "name": "weather",
            "description": "Tells the weather.",
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "look", "strict": True, "description": "", "parameters": {}}},
]


class Call(NamedTuple):
    """One request: the kind of prompt, its path, and its body."""

    kind: str
    path: str
    body: Mapping[str, Any]


class Counted(NamedTuple):
    """One request with our count and the engine's, which is a text if it refused."""

    call: Call
    ours: int
    theirs: int | str
    same_ids: bool

    @property
    def is_right(self) -> bool:
        """Whether both counted, and read, the same."""
        return self.ours == self.theirs and self.same_ids


def calls(number: int, seed: int = 1) -> Iterator[Call]:
    """`number` calls, each kind about as often; the same for the same seed."""
    rng = random.Random(seed)
    kinds = list(_KINDS.items())
    for at in range(number):
        kind, make = kinds[at % len(kinds)]
        made = make(rng)
        path = COMPLETION_PATH if "prompt" in made else CHAT_PATH
        yield Call(kind, path, {"model": MODEL, "max_tokens": 1, "temperature": 0, **made})


async def counted(router: Router, http: aiohttp.ClientSession, call: Call) -> Counted:
    """`call` through `router`, with both counts."""
    gateway = router.gateway
    tenant = gateway.config.anonymous or next(iter(gateway.config.tenants.values()))
    ask = (chat_ask if call.path == CHAT_PATH else completion_ask)(dict(call.body), {})
    model = gateway.models.find(ask.model, tenant, gateway.config)
    tokens = await gateway.prompts.tokens(ask, model, tenant, gateway.config)
    assert all(counts.token_ids for counts in tokens), f"{call.kind}: only estimated"
    async with http.post(router.http_url + call.path, json={**call.body, "return_token_ids": True}) as reply:
        content = await reply.json()
    if reply.status != 200:
        return Counted(call, sum(counts.count for counts in tokens), json.dumps(content)[:300], same_ids=False)
    holders = [content] if call.path == CHAT_PATH else content["choices"]
    ours = [list(unpack(counts.token_ids)) for counts in tokens]
    # an answer that was streamed inside the router has no ids
    same = all(counts.get("prompt_token_ids", ids) == ids for counts, ids in zip(holders, ours, strict=True))
    return Counted(call, sum(counts.count for counts in tokens), content["usage"]["prompt_tokens"], same)


def _text(rng: random.Random, words: int = 60) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, words)))


def _user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def _part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def _chat(rng: random.Random) -> dict[str, Any]:
    return {"messages": [_user(_text(rng))]}


def _with_system(rng: random.Random) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": _text(rng)}, _user(_text(rng))]}


def _turns(rng: random.Random) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 6)):
        turns += [_user(_text(rng, 25)), {"role": "assistant", "content": _text(rng, 25) + rng.choice(("", " ", "\n"))}]
    return {"messages": [*turns, _user(_text(rng))]}


def _tools(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice(({}, {"tool_choice": "auto"}, {"tool_choice": "none"}))
    return {**_with_system(rng), "tools": rng.sample(_TOOLS, rng.randint(1, 3)), **choice}


def _agent(rng: random.Random) -> dict[str, Any]:
    arguments = rng.choice(('{"place": "Köln", "days": 3}', "{}", "", "no json", '{"b": [1, 2.50, null], "a": "x"}'))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result: Any = rng.choice((_text(rng, 20), [_part("18 °C"), _part("rain")], json.dumps({"t": 18, "w": "rain"})))
    asked = {"role": "assistant", "content": rng.choice((None, "", "Let me see. ")), "tool_calls": [call]}
    if rng.random() < 0.4:
        asked["reasoning_content"] = _text(rng, 10)
    turns = [_user(_text(rng, 20)), asked, {"role": "tool", "tool_call_id": "call_1", "content": result}]
    return {"messages": turns, "tools": _TOOLS[:1]}


def _chinese(rng: random.Random) -> dict[str, Any]:
    return {"messages": [_user(_CHINESE * rng.randint(1, 8) + _text(rng, 3))]}


def _json(rng: random.Random) -> dict[str, Any]:
    rows = [{"id": rng.randrange(10**6), "ok": rng.random() < 0.5, "name": _text(rng, 3)} for _ in range(12)]
    return {"messages": [_user(json.dumps(rows, indent=rng.choice((None, 2))))]}


def _code(rng: random.Random) -> dict[str, Any]:
    return {"messages": [_user(_CODE * rng.randint(1, 6))]}


def _parts(rng: random.Random) -> dict[str, Any]:
    parts: list[Any] = [_part(_text(rng, 15)) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.5:
        parts.append(_part("marked", cache_control={"type": "ephemeral"}))
    turns = [{"role": "system", "content": [_part("Be short."), _part("Be kind.")]}, _user(parts, name="bob")]
    return {"messages": turns}


def _marks(rng: random.Random) -> dict[str, Any]:
    return {"messages": [_user("".join(rng.choices([*_MARKS, *_WORDS], k=40)))]}


def _continued(rng: random.Random) -> dict[str, Any]:
    last = _text(rng, 8) + rng.choice(("", " ", "\n\n"))
    content = [_part(_text(rng, 4)), _part(last)] if rng.random() < 0.3 else last
    turns = [_user(_text(rng)), {"role": "assistant", "content": content}]
    return {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}


def _unopened(rng: random.Random) -> dict[str, Any]:
    return {**_turns(rng), "add_generation_prompt": False}


def _variables(rng: random.Random) -> dict[str, Any]:
    chosen = rng.choice(
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low"},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
            {"documents": [{"title": "A", "text": _text(rng, 20)}]},
            {"chat_template_kwargs": {"documents": [{"title": "B", "text": "b"}], "reasoning_effort": "high"}},
        )
    )
    return {**_chat(rng), **chosen}


def _developer(rng: random.Random) -> dict[str, Any]:
    late = [{"role": "system", "content": _text(rng, 5)}] if rng.random() < 0.5 else []
    return {"messages": [{"role": "developer", "content": _text(rng, 9)}, _user(_text(rng)), *late, _user("So?")]}


def _cut(rng: random.Random) -> dict[str, Any]:
    side = rng.choice(({}, {"truncation_side": "left"}, {"truncation_side": "right"}))
    base = _turns(rng) if rng.random() < 0.5 else {"prompt": _text(rng) * 3}
    return {**base, "truncate_prompt_tokens": rng.choice((1, 20, 64, 700, -1)), **side}


def _with_specials(rng: random.Random) -> dict[str, Any]:
    base = _chat(rng) if rng.random() < 0.5 else {"prompt": _text(rng)}
    return {**base, "add_special_tokens": rng.random() < 0.5}


def _prompt(rng: random.Random) -> dict[str, Any]:
    text = rng.choice((_text(rng), _CODE, _CHINESE, "".join(rng.choices(_MARKS, k=9)) + "x"))
    return {"prompt": text if rng.random() < 0.7 else [text, _text(rng), text]}


def _ids(rng: random.Random) -> dict[str, Any]:
    return {"prompt": [rng.randrange(7, 1500) for _ in range(rng.randint(1, 300))]}


_KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    function.__name__.strip("_"): function
    for function in (
        *(_chat, _with_system, _turns, _tools, _agent, _chinese, _json, _code, _parts, _marks, _continued, _unopened),
        *(_variables, _developer, _cut, _with_specials, _prompt, _ids),
    )
}


def config_of(url: str, *, tokenizer: str | None = None, chat_template: str | None = None) -> str:
    """An SLA file with one vLLM at `url`; without a tokenizer its rules make the router ask the engine."""
    pool = {"kind": "vllm", "at": url, "model": MODEL, "tokenizer": tokenizer, "chat_template": chat_template}
    own_pool = json.dumps({name: value for name, value in pool.items() if value is not None})
    rules = "{class: chat}" if tokenizer else '{when: {prompt_tokens: ">= 100"}, class: chat}, {class: chat}'
    return SLA.format(pool=own_pool, rules=rules)


async def _run(options: argparse.Namespace) -> bool:
    tokenizer = options.tokenizer if options.source == "tokenizer" else None
    config = parse(config_of(options.url, tokenizer=tokenizer, chat_template=options.chat_template))
    kinds: Counter[str] = Counter()
    wrong: list[Counted] = []
    tokens = 0
    async with Router(config) as router, aiohttp.ClientSession() as http:
        assert await router.wait_until_reached(20), f"nothing answers at {options.url}"
        for call in calls(options.requests, options.seed):
            result = await counted(router, http, call)
            kinds[call.kind] += 1
            tokens += result.ours
            if not result.is_right:
                wrong.append(result)
        source = router.gateway.sources.origins().get(MODEL, "nothing")
    print(f"tokenizer from {source}")
    for kind, number in kinds.items():
        bad = sum(result.call.kind == kind for result in wrong)
        print(f"  {kind:14} {number - bad:4} of {number:4} equal")
    print(f"{sum(kinds.values()) - len(wrong)} of {sum(kinds.values())} counts equal, and all ids; {tokens} tokens")
    for result in wrong[:10]:
        print(f"  {result.call.kind}: {result.ours}, the engine {result.theirs}: {json.dumps(result.call.body)[:400]}")
    return not wrong


def main() -> None:
    """Count, compare and print; exits with 1 if any count differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--chat-template")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", choices=("tokenizer", "engine"), default="tokenizer")
    sys.exit(0 if asyncio.run(_run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()

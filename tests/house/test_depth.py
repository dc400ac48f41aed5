"""JSON of other programs that is nested 100,000 levels deep is refused like any other that is broken."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("router", "backends", "http1", "tls", "policies", "shards")

CATCHES = {"RecursionError", "MISSHAPEN", "Exception"}
DECODERS = ("json.decode", "json.loads", "json.load", "msgpack.decode")

CERTAIN = {
    # of this program's own making
    "router/version.py _installed": "the package's own metadata",
    "router/text/characters.py _parts": "a tokenizer's settings, as its library writes them",
    "router/start/commands/local_shards.py start": "what a shard of our own says",
    "router/shared/documents/redis.py notes_in": "a struct without values of any form",
    "router/shared/documents/redis.py sets_in": "a struct without values of any form",
    "router/shared/documents/redis.py _read": "a struct without values of any form",
    "router/shared/store/redis_levels.py _levels": "tuples without values of any form",
    "shards/gguf/tensors.py __init__": "an index of our own, and a struct without values of any form",
    "router/protocols/http/document_sets.py computing_ask": "messages whose depth was checked when they came",
    "backends/fastchat/backend.py generate": "a body of our own",
    "shards/grammar/trial.py serve": "from the shard itself",
    "shards/grammar/trial.py _try": "from the shard itself",
    "shards/grammar/trials.py rules_of": "from the shard itself",
    "shards/parallel/__main__.py ": "from the shard itself",
    # a text, or a caller that takes every error
    "router/text/tool_calls.py _written": "a text",
    "router/text/tool_calls.py _unquoted": "a text",
    "backends/http/json_members.py _members": "a text",
    "policies/sla/aliases.py _json_of": "a scalar",
    "router/text/tokenize.py work": "its caller takes every error",
    "router/text/chat_template.py __init__": "its caller takes every error",
    "router/text/chat_template.py _sources": "its caller takes every error",
    "shards/grammar/library.py _rules_of": "its caller takes a RecursionError",
    "shards/grammar/library.py _with_known_formats": "its caller takes a RecursionError",
    "shards/grammar/library.py _with_unwritable_names": "a file that the tokenizer's library has read",
    "shards/quant/write/checkpoint.py write_quantised": "a file that was read before",
    "router/shared/replicas/news.py decode": "the depth was checked",
    "backends/events/vllm.py decode": "`EventDecoder.decode` refuses what is deep",
    "backends/events/sglang.py decode": "`EventDecoder.decode` refuses what is deep",
}
"""File and function -> why no deep data reach it, or who takes the error."""


def test_what_is_nested_too_deeply_is_refused_wherever_it_is_decoded() -> None:
    found = {place for part in PARTS for file in (ROOT / part).rglob("*.py") for place in _uncaught(file)}
    assert not found - set(CERTAIN), "use backends.nesting.decode_json, or catch RecursionError as well"
    assert not set(CERTAIN) - found, "these are gone: take them off the list"


def _uncaught(file: Path) -> Iterator[str]:
    """The functions of `file` that decode, and do not catch the error of too many levels."""
    text = file.read_text("utf-8")
    if "msgspec" not in text and "json" not in text:
        return
    tree = ast.parse(text)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    made = set(_made(tree))
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("decode", "load", "loads"):
            continue
        called = ast.unparse(call.func)
        is_made = called.endswith(".decode") and called.split(".")[0] in made
        if not (called.endswith(DECODERS) or is_made) or _is_caught(call, above):
            continue
        yield f"{file.relative_to(ROOT)} {_function(call, above)}"


def _made(tree: ast.AST) -> Iterator[str]:
    """The names of a module's decoders."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and "Decoder(" in ast.unparse(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _is_caught(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    while (outer := above.get(node)) is not None:
        if isinstance(outer, ast.Try) and node in outer.body:
            kinds = [each for handler in outer.handlers if handler.type for each in ast.walk(handler.type)]
            if CATCHES & {kind.id for kind in kinds if isinstance(kind, ast.Name)}:
                return True
        node = outer
    return False


def _function(node: ast.AST, above: dict[ast.AST, ast.AST]) -> str:
    while (outer := above.get(node)) is not None:
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return outer.name
        node = outer
    return ""

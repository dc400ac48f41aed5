"""The section `aliases`: values are JSON, and names of the client's own members are refused."""

from __future__ import annotations

import pytest

from policies.aliases import Alias
from policies.errors import ConfigError
from policies.sla.parse import parse

POOLS = "pools: {own: {kind: vllm, at: 'http://x:1', model: small, models: {big: b}}}\n"


def test_an_alias_has_json_values_by_the_names_of_chats() -> None:
    config = parse(
        POOLS + "aliases:\n"
        "  bot:\n"
        "    model: small\n"
        "    defaults: {temperature: 0.2, seed: 7, response_format: {type: json_object}}\n"
        "    force: {max_tokens: 500, user: '12x', logprobs: false, stop: [a, b]}\n"
        "    remove: [tools, tool_choice]\n"
        "    system: Be brief.\n"
    )
    assert config.aliases["bot"] == Alias(
        "bot",
        "small",
        defaults={"temperature": 0.2, "seed": 7, "response_format": {"type": "json_object"}},
        force={"max_tokens": 500, "user": "12x", "logprobs": False, "stop": ["a", "b"]},
        remove=("tools", "tool_choice"),
        system="Be brief.",
    )


@pytest.mark.parametrize(
    ("alias", "says"),
    [
        ("bot: {}", "aliases.bot: has no model"),
        ("small: {model: big}", "aliases.small: is the name of a model of a pool"),
        ("bot: {model: other}, other: {model: big}", "aliases.bot.model: is an alias itself"),
        ("bot: {model: big, defaults: {top_p: 1}, force: {top_p: 1}}", "force.top_p: is in two of defaults, force"),
        ("bot: {model: big, defaults: {top_p: 1}, remove: top_p}", "is in two of defaults, force and remove"),
        ("bot: {model: big, force: {messages: []}}", "sets or removes `messages`, which is the client's own"),
        ("bot: {model: big, remove: [stream]}", "sets or removes `stream`"),
        ("bot: {model: big, force: {system: x}}", "(system: has a text)"),
        ("bot: {model: big, defaults: {seed: }}", "aliases.bot.defaults.seed: is empty"),
        ("bot: {model: big, force: 3}", "aliases.bot.force: must be a mapping"),
        ("bot: {model: big, defalts: {}}", "did you mean 'defaults'"),
    ],
)
def test_mistakes_are_named(alias: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(POOLS + f"aliases: {{{alias}}}\n")
    assert says in str(raised.value)

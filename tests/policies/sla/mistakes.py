"""Mistakes: sound examples and what people do to them, each with a part of the complaint that must follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.policies.sla.examples import ROOT


@dataclass(frozen=True)
class Mutation:
    """The example `name` with `old` replaced by `new`, and what the complaint says. `structural`: an editor sees it."""

    name: str
    old: str
    new: str
    says: str
    structural: bool = True

    @property
    def sound(self) -> str:
        return (ROOT / "examples" / f"{self.name}.yaml").read_text()

    @property
    def text(self) -> str:
        assert self.old in self.sound, f"{self.old!r} is not in {self.name}"
        return self.sound.replace(self.old, self.new, 1)

    @property
    def line(self) -> int:
        """The first line that differs."""
        pairs = zip(self.sound.split("\n"), self.text.split("\n"), strict=False)
        return next(number for number, (before, after) in enumerate(pairs, start=1) if before != after)

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}".replace("\n", "|").replace("\t", "<tab>")


def typos() -> Iterator[Mutation]:
    """A key with its second and third letter swapped."""
    for name, key in (
        ("saas", "classes"),
        ("saas", "tenants"),
        ("saas", "cost"),
        ("saas", "rules"),
        ("saas", "on_miss"),
        ("mixed-fleet", "server"),
        ("mixed-fleet", "queue"),
        ("saas", "ttft_p95"),
        ("saas", "floor"),
        ("saas", "preemptible"),
        ("rag-beside-chat", "prefill_slice"),
        ("saas", "requests_per_minute"),
        ("saas", "budget_per_day"),
        ("saas", "cached:"),
        ("mixed-fleet", "share_with"),
        ("mixed-fleet", "kind"),
        ("mixed-fleet", "uncached_tokens"),
        ("rag-beside-chat", "metadata:"),
        ("batch-at-night", "priority:"),
        ("mixed-fleet", "spill:"),
        ("mixed-fleet", "best_of"),
        ("mixed-fleet", "ageing"),
        ("mixed-fleet", "max_concurrent"),
    ):
        word = key.rstrip(":")
        typo = word[0] + word[2] + word[1] + word[3:]
        # as a key, not in a comment: the line's first or after a bracket
        yield Mutation(name, *_as_key(name, word, typo), f"did you mean '{word}'?")


def _as_key(name: str, word: str, typo: str) -> tuple[str, str]:
    text = (ROOT / "examples" / f"{name}.yaml").read_text()
    found = next(sign for sign in ("{", ", ", "\n", "    ") if f"{sign}{word}:" in text)
    return f"{found}{word}:", f"{found}{typo}:"


def kinds() -> Iterator[Mutation]:
    """A value of another kind than is wanted."""
    yield Mutation("saas", "weight: 8", "weight: [8, 9]", "must be text, not a list")
    yield Mutation("saas", "weight: 8", "weight: {a: 8}", "must be text, not a mapping")
    yield Mutation("saas", "weight: 2 ", "weight:   ", "must be text, not empty")
    yield Mutation("saas", "limits: {requests_per_minute: 120,", "limits: 7\n    x: {a: 120,", "must be a mapping")
    yield Mutation(
        "mixed-fleet", "[vllm, own], policy: spread", "{vllm: own}, policy: spread", "must be a part in proportion"
    )
    yield Mutation("one-tenant", "anonymous: true", "anonymous: yes please", "must be true or false")
    yield Mutation("saas", "cost: {", "cost: [1, 2, 3]\nx: {", "must be a mapping")
    yield Mutation("mixed-fleet", "at: [", "at: []\n    options: [", "is an empty list")
    yield Mutation("saas", "free:       shed", "free:       {}", "must be one step, alone or as {name: value}")
    yield Mutation("saas", "free:       shed", "free:       queue", "needs a value (write {queue: ...}")


def quantities() -> Iterator[Mutation]:
    """A quantity that cannot be read."""
    yield Mutation("saas", "500ms", "500", "must be a duration like 800ms")
    yield Mutation("saas", "500ms", "0.5 seconds", "must be a duration like 800ms")
    yield Mutation("saas", "500ms", "0ms", "must be above zero", structural=False)
    yield Mutation("saas", "6000", "6e3", "must be a whole number", structural=False)
    yield Mutation("saas", "6000", "0", "must be above zero")
    yield Mutation("saas", "20M", "20 million", "must be a whole number above zero")
    yield Mutation("saas", "20%", "120%", "must be a share of at most 100%", structural=False)
    yield Mutation("saas", "20%", "20", "must be a share of at most 100%")
    yield Mutation("mixed-fleet", "32MiB", "32 MegaBytes", "must be a size like 16MiB")
    yield Mutation("mixed-fleet", '">= 16k"', "16k", "must be a comparison like")
    yield Mutation("mixed-fleet", "{shed: 429}", "{shed: 418}", "must be 429 (Too Many Requests) or 503")
    yield Mutation("mixed-fleet", '"0.0.0.0:8080"', "8080", "must be host:port, such as")
    yield Mutation("saas", "cached: 0.1", "cached: cheap", "must be a number like 1 or 0.1")
    yield Mutation("saas", '"sha256:', '"sha255:', "must not stand in plain text")
    yield Mutation("saas", "weight: 8", f"weight: {'9' * 400}", "must be a number above zero", structural=False)


def names() -> Iterator[Mutation]:
    """A name that nothing has."""
    unknown = {"structural": False}
    yield Mutation(
        "saas", "classes: [enterprise, pro]", "classes: [enterprize, pro]", "did you mean 'enterprise'?", **unknown
    )
    yield Mutation("saas", "  free:       shed", "  freee:      shed", "did you mean 'free'?", **unknown)
    yield Mutation("saas", "{class: pro}", "{class: prro}", "did you mean 'pro'?", **unknown)
    yield Mutation("saas", "{degrade: small}", "{degrade: smal}", "did you mean 'small'?", **unknown)
    yield Mutation("mixed-fleet", "{spill: rented}", "{spill: rentd}", "did you mean 'rented'?", **unknown)
    yield Mutation("mixed-fleet", "tenant: chat", "tenant: chta", "did you mean 'chat'?", **unknown)
    yield Mutation("mixed-fleet", "priority: batch", "priority: btach", "did you mean 'batch'?", **unknown)
    yield Mutation("mixed-fleet", "policy: spread", "policy: spraed", "did you mean 'spread'?", **unknown)
    yield Mutation("mixed-fleet", "pools: [own]}", "pools: [onw]}", "did you mean 'own'?", **unknown)
    yield Mutation("mixed-fleet", "share_with: [rag]", "share_with: [rga]", "did you mean 'rag'?", **unknown)
    yield Mutation("mixed-fleet", "kind: shard", "kind: shrad", "did you mean 'shard'?")
    yield Mutation("mixed-fleet", "serves_model", "serves_modle", "did you mean 'serves_model'?")
    yield Mutation("rag-beside-chat", "cache_overlap: 2", "cache_overlp: 2", "did you mean 'cache_overlap'?")
    yield Mutation("saas", "${env:GLOBEX_KEY}", "${evn:GLOBEX_KEY}", "must be a whole ${env:NAME}")


def missing() -> Iterator[Mutation]:
    """A part that must be there."""
    yield Mutation("saas", "- {class: free}", "- {}", "has no class (add class:")
    yield Mutation("mixed-fleet", "- {class: interactive, pools: [own, vllm]}", "", "match no rule", structural=False)
    yield Mutation("saas", '    keys: ["${env:GLOBEX_KEY}"]\n', "", "has no keys", structural=False)
    yield Mutation("one-tenant", "kind: shard, local: 2, ", "", "has no backends (write at:", structural=False)
    yield Mutation("saas", "{queue: 10s}", "", "must be text, not empty")


def yaml_itself() -> Iterator[Mutation]:
    """YAML that is invalid, or refused by us."""
    plain = {"structural": False}
    yield Mutation("saas", "  pro:        {t", "  enterprise: {t", "is here twice, first in line", **plain)
    yield Mutation("saas", "weight: 8}", "weight: 8, weight: 9}", "is here twice, first in line", **plain)
    yield Mutation("saas", "\n  initech:", "\n\tinitech:", "indent with spaces", **plain)
    yield Mutation("saas", "\n    weight: 2", "\n\tweight: 2", "indent with spaces", **plain)
    yield Mutation("saas", "weight: 8}", "weight: 8", "not YAML", **plain)
    yield Mutation("saas", "weight: 8", "weight: !!int 8", "tags like", **plain)
    yield Mutation("saas", "weight: 8", "weight: *eight", "there is no anchor 'eight'", **plain)
    yield Mutation("saas", "cost:", "---\ncost:", "there is a second document", **plain)


MUTATIONS = [*typos(), *kinds(), *quantities(), *names(), *missing(), *yaml_itself()]

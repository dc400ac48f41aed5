"""The causes of lost cached tokens and of missed targets: what each means, and which settings change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class CauseText(NamedTuple):
    """What a cause means, and its remedy: keys of the SLA file and options of engines."""

    meaning: str
    remedy: str


_SLOW_BACKEND = CauseText(
    "the backend took longer than predicted, or than the others of its pool would have",
    "look at this backend: its clocks, other programs there, its log. pools.*.health sets when it counts as ill",
)

HIT_CAUSES: Mapping[str, CauseText] = {
    "capacity": CauseText(
        "too small caches: a single one of their total size had evicted the prefix",
        "more KV: more backends (pools.*.at, pools.*.local); kv-memory, kv-dtype, host-memory or kv-dir of shards; "
        "--gpu-memory-utilization or --kv-cache-dtype of vLLM",
    ),
    "cache_domains": CauseText(
        "the prefix was cached in another cache domain only",
        "tenants.*.cache.share_with, if these tenants may share prefixes",
    ),
    "copies": CauseText(
        "no backend had kept the prefix: several kept copies of others, or some had more to keep than others",
        "rules.*.policy: default, or a larger weight of cache_thrift in policies.*.score: it spreads prefixes evenly "
        "and copies few",
    ),
    "placement": CauseText(
        "another backend held the prefix, and the router knew",
        "rules.*.policy: default, or a larger weight of cache_thrift or cache_overlap in policies.*.score. If a filter "
        "dropped the holder: waits_for_best in policies.*, or more backends",
    ),
    "index_errors": CauseText(
        "another backend held the prefix, and the router did not know, or believed that the chosen one held it",
        "cache events of every backend (events and replay in pools.*.options, see docs/feeds.md); store.redis, so that "
        "several routers share what they know",
    ),
    "overlap": CauseText(
        "the backend was still computing the prefix for an earlier request",
        "compute prefixes that many requests share ahead of them (docs/prefixes.md)",
    ),
    "engine_eviction": CauseText(
        "a backend had computed the prefix and had room for it, and no longer had it",
        "--enable-prefix-caching of vLLM; fewer running requests, which take KV from the cache: max-running of shards, "
        "--max-num-seqs of vLLM",
    ),
}
"""Losses of cached tokens, in the order in which they are taken from the ideal."""

TTFT_CAUSES: Mapping[str, CauseText] = {
    "router_queue": CauseText(
        "the request waited in the router for a backend with room",
        "more backends (pools.*.at, pools.*.local); more requests at once: max-running of shards, --max-num-seqs of "
        "vLLM; spill or shed in on_miss",
    ),
    "retries": CauseText(
        "a backend failed, and the request went to another one",
        "the field error of the log; failures, suspect_after and first_byte in pools.*.health",
    ),
    "backend_queue": CauseText(
        "the backend first computed prompts that were there already, or had no place for another request",
        "rules.*.policy: default; under_limit in policies.*.filter, so that requests wait in the router; more backends",
    ),
    "prefill": CauseText(
        "the backend computed the part of the prompt that no cache could have had",
        "faster backends, or a class with a later target for long prompts: when: {uncached_tokens: ...} in rules",
    ),
    "lost_tokens": CauseText(
        "the backend computed tokens that one infinite cache would have had",
        "see the losses of the hit rate",
    ),
    "interference": CauseText(
        "the backend computed later prompts, and answers, at the same time",
        "pools of their own for long prompts or answers (rules.*.pools); prefill_slice of their class; more backends",
    ),
    "slow_backend": _SLOW_BACKEND,
}
"""Parts of a missed TTFT, in the order in which they happen."""

TPOT_CAUSES: Mapping[str, CauseText] = {
    "decode": CauseText(
        "the tokens of the answer, as if it ran alone",
        "a faster backend, a smaller or quantized model, or a longer classes.*.tpot_*",
    ),
    "interference": CauseText(
        "the backend decoded other answers in the same steps, and computed prompts in between",
        "fewer requests at once and shorter steps: max-running and step-ms of shards, --max-num-seqs and "
        "--max-num-batched-tokens of vLLM; prefill_slice of long prompts' class; pools of their own (rules.*.pools)",
    ),
    "slow_backend": _SLOW_BACKEND,
}
"""Parts of a missed TPOT."""

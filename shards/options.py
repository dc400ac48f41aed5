"""Options of an engine. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shards.kv.keys import BLOCK_TOKENS
from shards.kv.options import PoolOptions
from shards.kv.peer_identity import PeerTls
from shards.lora.options import AdapterOptions
from shards.sched.drafts import FEW_ROWS_ON_DEVICE
from shards.sched.plan import StepLimits

DETERMINISTIC_UNIT_TOKENS = 256
"""Chunk size of a deterministic engine: a smaller one costs speed, a larger one costs cache hits."""

RUN_AHEAD = ("auto", "on", "off")

SPECULATE = ("auto", "off")

BLEND = ("auto", "off")

WINDOW_KV = ("auto", "all")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`kv_blocks` blocks of KV, or as many as `kv_bytes` hold. `max_running` sequences run and `max_waiting` wait.

    `window_tokens`: prompt tokens that may arrive ahead of the computed ones. `step_s`: target duration of a step;
    `lanes`, `chunk_tokens` and `batch_tokens` are those of `StepLimits`.

    `host_bytes` of host memory take preempted and evicted KV; `pool`: pins and floors. `adapters`: LoRA
    adapters that requests may name. Evicted KV is written to
    `kv_dir` too, up to `kv_dir_bytes`, and read again by this and later engines with the same model.

    With `kv_listen` (host and port) KV is fetched from other shards, and other shards fetch from this port, if they
    know the same `kv_secret`, over TLS with `kv_tls`. Other machines may reach the port only with one of both.

    A rank improves by one per `ageing_s` of waiting. A request is preempted at most `most_preemptions` times, and not
    within `preempt_cooldown_s` after it resumed.

    `run_ahead`: a step is planned and submitted while the device computes the previous one, and takes its tokens on the
    device; on, off, or auto. auto is on if the network supports it and the engine is not deterministic. No token
    changes. A sequence that stops computes one token in vain, which is neither shown, counted nor cached.

    `speculate`: for an answer that repeats its prompt or itself, the next tokens are guessed (prompt lookup) and
    verified in the same step as the certain token, if that is expected to give more tokens per second; auto or off.
    auto is on unless the engine is deterministic. On a device no step is submitted ahead of one with guesses, which
    counts as its cost. Tokens are drawn as without it, from logits that differ by rounding only. Penalties depend on
    earlier tokens, so requests with penalties are excluded.

    `blend`: requests that permit it take the KV of documents from wherever they stood before; auto or off. auto is on
    if the network can move KV and the engine is not deterministic.

    `window_kv`: what is kept of layers that see only the last positions of a sequence; auto or all. auto keeps what
    they still see, in pages of their own, if that leaves more blocks, the network supports it, and no blocks leave the
    device (`host_bytes`, `kv_dir`, `kv_listen`). Then nothing is blended.

    `deterministic`: a request's tokens do not depend, to the last bit, on its neighbours, on the cache or on how its
    prompt was cut. Sequences are then computed one by one, prompts in chunks that end at multiples of 256; only whole
    chunks of prompts are cached, and drawn tokens are recomputed one by one after a preemption. Price: decoding n
    sequences reads the weights n times, so at 64 chats a step takes up to 64 times as long; a hit is up to 255 tokens
    shorter; the next turn does not find the answer in the cache.
    """

    kv_blocks: int | None = None
    kv_bytes: int = 2**30
    max_running: int = 64
    max_waiting: int = 512
    window_tokens: int = 65536
    step_s: float = 0.05
    lanes: int = 8
    chunk_tokens: int = 8192
    batch_tokens: int = 16384
    ageing_s: float = 30.0
    preempt_cooldown_s: float = 5.0
    most_preemptions: int = 3
    deterministic: bool = False
    run_ahead: str = "auto"
    speculate: str = "auto"
    blend: str = "auto"
    window_kv: str = "auto"
    host_bytes: int = 0
    kv_dir: Path | None = None
    kv_dir_bytes: int = 16 * 2**30
    kv_listen: tuple[str, int] | None = None
    kv_secret: bytes = field(default=b"", repr=False)
    kv_tls: PeerTls | None = None
    pool: PoolOptions = field(default_factory=PoolOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)

    def blocks(self, block_bytes: int) -> int:
        """The number of blocks of `block_bytes` that the engine gets. Raises ValueError if there is not one."""
        blocks = self.kv_bytes // block_bytes if self.kv_blocks is None else self.kv_blocks
        if blocks < 1:
            raise ValueError(f"{self.kv_bytes} bytes hold no KV block of {block_bytes} bytes; give the engine more")
        if self.window_tokens < self.unit_tokens:
            raise ValueError(f"window_tokens is {self.window_tokens}; a block of {self.unit_tokens} must fit in")
        if not self.ageing_s > 0:
            raise ValueError(f"ageing_s is {self.ageing_s}; it must be above 0")
        return blocks

    def runs_ahead(self, *, is_possible: bool) -> bool:
        """Whether a step is planned before the previous one is collected. Raises ValueError for an impossible option.

        `is_possible`: the network draws on a device.
        """
        if self.run_ahead not in RUN_AHEAD:
            raise ValueError(
                f"run_ahead is {self.run_ahead}; it must be {', '.join(RUN_AHEAD[:-1])} or {RUN_AHEAD[-1]}"
            )
        if self.run_ahead == "on" and self.deterministic:
            raise ValueError("run_ahead is on; a deterministic engine computes one step after the other")
        if self.run_ahead == "on" and not is_possible:
            raise ValueError(
                "run_ahead is on; this model's tokens are drawn on the host, which must wait for each step"
            )
        return is_possible and not self.deterministic and self.run_ahead != "off"

    @property
    def speculates(self) -> bool:
        """Whether guesses are verified. Raises ValueError if invalid."""
        if self.speculate not in SPECULATE:
            raise ValueError(f"speculate is {self.speculate}; it must be {' or '.join(SPECULATE)}")
        return not self.deterministic and self.speculate != "off"

    def drawn_rows(self, most_rows: int) -> int:
        """The most tokens that a step of a device draws, which can draw `most_rows`: one for each sequence, and where
        drafts are verified as many as are nearly free.
        """
        return max(self.max_running, min(most_rows, FEW_ROWS_ON_DEVICE if self.speculates else 0))

    def blends(self, *, is_possible: bool) -> bool:
        """Whether KV of chunks is blended. Raises ValueError if invalid. `is_possible`: the network can move KV."""
        if self.blend not in BLEND:
            raise ValueError(f"blend is {self.blend}; it must be {' or '.join(BLEND)}")
        return is_possible and not self.deterministic and self.blend != "off"

    def divides(self, *, is_possible: bool) -> bool:
        """Whether KV of layers with a window may have pages of its own. Raises ValueError if invalid.

        `is_possible`: the network can divide it.
        """
        if self.window_kv not in WINDOW_KV:
            raise ValueError(f"window_kv is {self.window_kv}; it must be {' or '.join(WINDOW_KV)}")
        stays = not self.host_bytes and self.kv_dir is None and self.kv_listen is None
        return is_possible and stays and self.window_kv != "all"

    @property
    def unit_tokens(self) -> int:
        """Chunks of prompts end at multiples of this."""
        return DETERMINISTIC_UNIT_TOKENS if self.deterministic else BLOCK_TOKENS

    @property
    def step(self) -> StepLimits:
        """The limits of a plan."""
        return StepLimits(self.step_s, self.lanes, self.chunk_tokens, self.batch_tokens, self.unit_tokens)

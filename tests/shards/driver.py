"""An engine on a fake network and a clock that stands still, and all its reports."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable

import pytest
from tokenizers import Tokenizer, decoders, models

from shards.draft_model import DraftModel
from shards.engine import Engine, EngineOptions
from shards.exec.fake import FakeNetwork
from shards.exec.network import Network
from shards.kv.block_files import BlockFiles
from shards.kv.copier import BlockMemory, InlineCopier
from shards.model import Model
from shards.nouns import CacheChange, Drawn, Finished, Load, SamplingParams, Submission
from tests.shards.kv.blocks_on_disk import LateDisk

EOS = 255


class Clock:
    """Stands still until it is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class LaggingCopier(InlineCopier):
    """Says that copies have landed only when it was asked `lag` times."""

    lag = 0
    asked = 0

    def done(self, ticket: int) -> bool:
        self.asked += 1
        return self.asked % (self.lag + 1) == 0


class Driver:
    """An engine on a fake network, and all its reports."""

    def __init__(
        self,
        network: Network | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos: int = EOS,
        clock: Clock | None = None,
        draft_model: DraftModel | None = None,
        **options: object,
    ) -> None:
        self.network = network or FakeNetwork()
        self.copiers: list[LaggingCopier] = []
        self.worker: LateDisk | None = None
        self.clock = clock or Clock()
        model = Model("m", self.network, tokenizer or a_tokenizer(), frozenset({eos}), weights="those of a driver")
        self.engine = Engine(
            model,
            EngineOptions(**{"kv_blocks": 64, **options}),  # type: ignore[arg-type]
            clock=self.clock,
            rng=random.Random(0),
            copier_of=self._make_copier,
            worker_of=self._make_worker,
            draft_model=draft_model,
        )
        self.drawn: dict[tuple[Hashable, int], list[int]] = defaultdict(list)
        self.draws: list[Drawn] = []
        self.ended: dict[tuple[Hashable, int], Finished] = {}
        self.progress: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self.tiers: dict[str, set[int]] = defaultdict(set)
        self.load: Load | None = None

    def ask(self, key: Hashable, prompt: Iterable[int], new: int = 5, **more: object) -> None:
        """Submit a request and send its prompt whole."""
        prompt = list(prompt)
        self.open(key, len(prompt), new, **more)
        self.engine.extend(key, packed(prompt))

    def open(self, key: Hashable, prompt_tokens: int, new: int = 5, **more: object) -> None:
        """Submit a request; names of SamplingParams go there."""
        sampling = {name: more.pop(name) for name in list(more) if name in SamplingParams.__dataclass_fields__}
        params = SamplingParams(**{"ignore_eos": True, **sampling})  # type: ignore[arg-type]
        self.engine.submit(Submission(key, prompt_tokens, new, sampling=params, **more))  # type: ignore[arg-type]

    def step(self, *, check: bool = True) -> None:
        """One step, checked (which takes longer than the step) and noted."""
        report = self.engine.step()
        self.load = report.load
        if check:
            self.engine.check()
        for drawn in report.drawn:
            self.draws.append(drawn)
            self.drawn[drawn.key, drawn.choice] += drawn.token_ids
        for finished in report.finished:
            assert (finished.key, finished.choice) not in self.ended, "a choice ended twice"
            self.ended[finished.key, finished.choice] = finished
        for progress in report.progress:
            self.progress[progress.key].append((progress.computed_tokens, progress.cached_tokens))
        for event in report.cache:
            if event.change is CacheChange.STORED:
                assert not self.tiers[event.tier] & set(event.keys), "a block was stored twice"
                self.tiers[event.tier] |= set(event.keys)
            elif event.change is CacheChange.EVICTED:
                self.tiers[event.tier] -= set(event.keys)
            else:
                self.tiers.clear()
        held = {tier: keys for tier, keys in self.tiers.items() if keys}
        assert not check or {event.tier: set(event.keys) for event in self.engine.snapshot()} == held

    @property
    def held(self) -> set[int]:
        """Keys of what the engine says it has cached, in any tier."""
        return set().union(*self.tiers.values())

    def _make_copier(self, memory: BlockMemory) -> LaggingCopier:
        self.copiers.append(LaggingCopier(memory))
        return self.copiers[-1]

    def _make_worker(self, files: BlockFiles, clock: Callable[[], float]) -> LateDisk:
        self.worker = LateDisk(files, clock=clock)
        return self.worker

    def sleep(self) -> None:
        """Let time pass as an idle loop would: until there is something to do. Fails if nothing would ever wake it."""
        if not self.engine.has_work:
            wakes_s = self.engine.next_deadline_s
            assert wakes_s is not None, f"asleep for good: {self.engine!r}"
            self.clock.now_s = max(self.clock.now_s, wakes_s)

    def run(self, most_steps: int = 3000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.step()
        pytest.fail(f"still at work after {most_steps} steps: {self.engine!r}")

    def assert_nothing_is_held(self) -> None:
        load = self.engine.step().load
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
        assert load.blocks_free == load.blocks_total
        self.engine.check()


def a_tokenizer() -> Tokenizer:
    """Token i is the letter chr(65 + i % 26) and, if that letter is taken, a number behind it."""
    names = {f"{chr(65 + token % 26)}{token // 26 or ''}": token for token in range(256)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="A"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def packed(prompt: Iterable[int]) -> bytes:
    tokens = list(prompt)
    return struct.pack(f"<{len(tokens)}I", *tokens)


def some_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]

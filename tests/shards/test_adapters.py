"""Requests name LoRA adapters: each is answered by its own, in one batch and from a cache of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.engine import Engine, EngineOptions
from shards.exec.fake import FakeNetwork
from shards.kv.keys import block_keys, root_key
from shards.lora.options import AdapterOptions
from shards.model import Model
from shards.network.errors import CheckpointError
from shards.nouns import Blend, CacheChange, Cause, DocumentSpan, Finished, FinishReason, SamplingParams, Submission
from tests.shards.lora.adapters import ATTENTION, load_adapter, save_adapter
from tests.shards.tiny_checkpoints import save_checkpoint, some_tokens

NEW_TOKENS = 5
GREEDY = SamplingParams(ignore_eos=True)


class Answers:
    """An engine, and the tokens and ends of all requests that it got."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.drawn: dict[str, list[int]] = {}
        self.ends: dict[str, Finished] = {}
        self.stored: set[int] = set()

    def submit(self, key: str, prompt: Sequence[int], adapter: str = "", **changes: Any) -> None:
        self.drawn[key] = []
        submission = Submission(key, len(prompt), NEW_TOKENS, sampling=GREEDY, adapter=adapter)
        self.engine.submit(replace(submission, **changes))
        self.engine.extend(key, torch.tensor(prompt, dtype=torch.int32).numpy().tobytes())

    def step(self) -> None:
        report = self.engine.step()
        for drawn in report.drawn:
            self.drawn[str(drawn.key)] += drawn.token_ids
        self.ends.update((str(finished.key), finished) for finished in report.finished)
        for event in report.cache:
            (self.stored.update if event.change is CacheChange.STORED else self.stored.difference_update)(event.keys)
        self.engine.check()

    def run(self) -> None:
        while self.drawn.keys() != self.ends.keys():
            self.step()

    def answer(self, key: str, prompt: Sequence[int], adapter: str = "", **changes: Any) -> list[int]:
        self.submit(key, prompt, adapter, **changes)
        self.run()
        return self.drawn[key]

    def cached(self, key: str) -> int:
        return self.ends[key].cached_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in `base`, and adapters in `adapters/a`, `b` and `c`."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(save_checkpoint(folder / "base", "llama"), folder / "adapters" / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Mapping[str, Any]:
    """transformers' model, tuned by each adapter, and by none."""
    models = {name: save_checkpoint(folder / "base", "llama") for name in ("", "a", "b", "c")}
    return {name: load_adapter(model, folder / "adapters" / name) if name else model for name, model in models.items()}


def wanted(model: Any, prompt: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def an_engine(
    folder: Path, *, blocks: int = 64, clock: Callable[[], float] = time.monotonic, **options: Any
) -> Answers:
    adapters = {"folder": folder / "adapters", **options.pop("adapters", {})}
    model = Model.load(folder / "base", name="tiny")
    chosen = EngineOptions(kv_blocks=blocks, adapters=AdapterOptions(**adapters), **options)
    return Answers(Engine(model, chosen, clock=clock))


def test_one_batch_has_several_adapters_and_the_model_itself(folder: Path, expected: Mapping[str, Any]) -> None:
    answers = an_engine(folder)
    prompts = {name: some_tokens(70 + 7 * number, seed=number) for number, name in enumerate(expected)}
    for name, prompt in prompts.items():
        answers.submit(name or "base", prompt, name)
    answers.run()
    for name, prompt in prompts.items():
        assert answers.drawn[name or "base"] == wanted(expected[name], prompt)


def test_an_adapter_shares_its_cache_with_itself_alone(folder: Path, expected: Mapping[str, Any]) -> None:
    answers, prompt = an_engine(folder), some_tokens(150)
    for name in ("", "a", "b"):
        assert answers.answer(f"{name} 1", prompt, name) == wanted(expected[name], prompt)
        assert answers.cached(f"{name} 1") == 0
    for name in ("", "a", "b"):
        assert answers.answer(f"{name} 2", prompt, name) == wanted(expected[name], prompt)
        assert answers.cached(f"{name} 2") == 128


def test_block_keys_are_those_of_a_model_with_the_adapters_name(folder: Path) -> None:
    answers, prompt = an_engine(folder), some_tokens(150)
    answers.answer("x", prompt, "a", domain="tenant")
    tokens = torch.tensor(prompt, dtype=torch.int32).numpy().tobytes()
    assert answers.stored == set(block_keys(tokens, root_key("a", "tenant")))
    assert answers.engine.pin("p", sorted(answers.stored), domain="other", for_s=9).held == 0
    assert answers.engine.pin("p", block_keys(tokens, root_key("a", "tenant")), domain="tenant", for_s=9).held == 2


def test_clearing_a_domain_clears_its_adapters_and_no_other_domain(folder: Path) -> None:
    answers, prompt = an_engine(folder), some_tokens(150)
    for number, (domain, adapter) in enumerate([("x", ""), ("x", "a"), ("y", "a")]):
        answers.answer(str(number), prompt, adapter, domain=domain)
    assert answers.engine.clear_cache("x") == 4
    answers.answer("3", prompt, "a", domain="x")
    answers.answer("4", prompt, "a", domain="y")
    assert (answers.cached("3"), answers.cached("4")) == (0, 128)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 2)), min_size=1, max_size=8))
def test_any_mix_in_a_small_pool_gives_the_tokens_of_peft(
    folder: Path, expected: Mapping[str, Any], requests: list[tuple[str, int]]
) -> None:
    known: dict[tuple[str, int], list[int]] = {}
    # two of three adapters fit, and three prompts' blocks: all come and go
    answers = an_engine(folder, blocks=10, adapters={"most": 2}, host_bytes=2**20)
    for number, (name, seed) in enumerate(requests):
        answers.submit(str(number), some_tokens(140, seed=seed), name)
    answers.run()
    for number, request in enumerate(requests):
        if request not in known:
            known[request] = wanted(expected[request[0]], some_tokens(140, seed=request[1]))
        assert answers.drawn[str(number)] == known[request]
    answers.engine.close()


def test_adapters_are_loaded_on_demand_and_the_least_recently_used_one_goes(folder: Path) -> None:
    answers, prompt = an_engine(folder, adapters={"most": 2}), some_tokens(20)
    use = answers.engine.adapter_use
    assert use is not None
    assert (use.known, use.loaded, use.slots) == (("a", "b", "c"), (), 2)
    for number, (name, loaded) in enumerate([("a", ("a",)), ("b", ("a", "b")), ("a", ("a", "b")), ("c", ("a", "c"))]):
        answers.answer(str(number), prompt, name)
        assert answers.engine.adapter_use == use._replace(loaded=loaded)


def test_a_request_waits_until_an_adapter_in_use_is_not_used_any_more(folder: Path) -> None:
    answers, prompt = an_engine(folder, adapters={"most": 1}), some_tokens(20)
    answers.submit("first", prompt, "a")
    while not answers.drawn["first"]:
        answers.step()
    answers.submit("second", prompt, "b")
    answers.step()
    use = answers.engine.adapter_use
    assert use is not None
    assert (use.loaded, use.active) == (("a",), ("a", "b"))
    answers.run()
    assert list(answers.ends) == ["first", "second"]


def test_memory_bounds_adapters_too(folder: Path) -> None:
    model = Model.load(folder / "base")
    _, form = model.network.adapt(AdapterOptions())  # type: ignore[attr-defined]
    size = form.size(folder / "adapters" / "a")
    answers = an_engine(folder, adapters={"most_bytes": 2 * size + 1})
    for name in "abc":
        answers.answer(name, some_tokens(20), name)
    use = answers.engine.adapter_use
    assert use is not None
    assert use.loaded == ("b", "c")
    too_small = an_engine(folder, adapters={"most_bytes": size - 1})
    assert too_small.answer("x", some_tokens(20), "a") == []
    assert "raise --lora-memory" in too_small.ends["x"].message


def test_a_cancelled_request_leaves_its_adapter(folder: Path) -> None:
    answers = an_engine(folder, adapters={"most": 1})
    answers.submit("x", some_tokens(20), "a")
    answers.engine.cancel("x")
    answers.run()
    assert answers.answer("y", some_tokens(20), "b")
    use = answers.engine.adapter_use
    assert use is not None
    assert (use.loaded, use.active) == (("b",), ())


def test_an_adapter_that_comes_later_is_served_and_one_that_changes_is_loaded_again(
    folder: Path, tmp_path: Path, expected: Mapping[str, Any]
) -> None:
    own, prompt = tmp_path / "adapters", some_tokens(150)
    own.mkdir()
    answers = an_engine(folder, adapters={"folder": own, "look_s": 0})
    assert answers.answer("none", prompt, "x") == []
    assert answers.ends["none"].message == "this shard has no adapter 'x'; it has none"
    assert answers.ends["none"].cause is Cause.INVALID

    def see() -> None:
        # one step begins to look, and a later one takes over what was found
        before = answers.engine.adapter_use
        while answers.engine.adapter_use == before:
            answers.step()

    shutil.copytree(folder / "adapters" / "a", own / "x")
    see()
    assert answers.answer("first", prompt, "x") == wanted(expected["a"], prompt)
    assert answers.answer("second", prompt, "x") == wanted(expected["a"], prompt)
    assert answers.cached("second") == 128
    shutil.rmtree(own / "x")
    see()
    shutil.copytree(folder / "adapters" / "b", own / "x")
    see()
    assert answers.answer("third", prompt, "x") == wanted(expected["b"], prompt)
    assert answers.cached("third") == 0
    assert answers.answer("fourth", prompt, "x") == wanted(expected["b"], prompt)
    assert answers.cached("fourth") == 128


def test_a_broken_adapter_costs_its_own_requests_only(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "adapters"
    shutil.copytree(folder / "adapters", own)
    tensors = own / "b" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    (own / "c" / "adapter_config.json").write_text('{"peft_type": "LOHA", "r": 1, "lora_alpha": 1}')
    answers = an_engine(folder, adapters={"folder": own})
    for name in "abc":
        answers.submit(name, some_tokens(20), name)
    answers.run()
    reasons = {key: end.reason for key, end in answers.ends.items()}
    assert reasons == {"a": FinishReason.LENGTH, "b": FinishReason.REJECTED, "c": FinishReason.REJECTED}
    assert "is the download complete?" in answers.ends["b"].message
    assert "peft_type is LOHA" in answers.ends["c"].message


def test_a_named_adapter_must_be_there_when_the_shard_starts(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        an_engine(folder, adapters={"named": {"x": tmp_path}})
    with pytest.raises(NotADirectoryError, match="no folder of adapters"):
        an_engine(folder, adapters={"folder": tmp_path / "absent"})
    with pytest.raises(ValueError, match="all printable"):
        an_engine(folder, adapters={"named": {"a\x00b": folder / "adapters" / "a"}})


def test_a_network_that_cannot_be_adapted_is_refused_at_the_start(folder: Path) -> None:
    options = EngineOptions(kv_blocks=8, adapters=AdapterOptions(folder=folder / "adapters"))
    with pytest.raises(ValueError, match="this one has none"):
        Engine(Model("m", FakeNetwork()), options)


def test_a_shard_without_adapters_refuses_their_requests(folder: Path) -> None:
    answers = Answers(Engine(Model.load(folder / "base"), EngineOptions(kv_blocks=8)))
    assert answers.answer("x", some_tokens(5), "a") == []
    assert answers.ends["x"].message == "this shard serves no adapters"


def test_no_prompt_is_computed_in_an_adapters_domain_by_its_name_alone(folder: Path) -> None:
    answers = an_engine(folder)
    answers.answer("x", some_tokens(70), domain="t\x00adapter\x00digest\x00a")
    assert "name the adapter instead" in answers.ends["x"].message


def test_chunks_of_documents_are_computed_with_the_adapter(folder: Path) -> None:
    answers = an_engine(folder)
    prompt = some_tokens(200)
    # chunks begin with the first four tokens of their prompt
    moved = prompt[:4] + some_tokens(96, seed=9) + prompt[10:110] + some_tokens(30, seed=3)
    for adapter, key in (("", "base"), ("a", "a"), ("b", "b")):
        blend = Blend((DocumentSpan(10, 110),), 0.0)
        answers.answer(key, prompt, adapter, blend=blend)
        answers.answer(f"{key} moved", moved, adapter, blend=Blend((DocumentSpan(100, 200),), 0.0))
        # the first one of each adapter computes its own chunk, and the second one takes it
        assert (answers.ends[key].blended_tokens, answers.ends[f"{key} moved"].blended_tokens > 90) == (0, True)


def test_a_deterministic_engine_serves_adapters(folder: Path, expected: Mapping[str, Any]) -> None:
    answers = an_engine(folder, deterministic=True)
    for name in ("", "a"):
        assert answers.answer(f"x{name}", some_tokens(80), name) == wanted(expected[name], some_tokens(80))


def test_blocks_on_disk_belong_to_the_weights_of_an_adapter(folder: Path, tmp_path: Path) -> None:
    own, prompt = tmp_path / "adapters", some_tokens(150)
    shutil.copytree(folder / "adapters" / "a", own / "x")
    for source, cached in (("a", 0), ("a", 128), ("b", 0)):
        shutil.rmtree(own / "x")
        shutil.copytree(folder / "adapters" / source, own / "x")
        # on a clock that stands still, reading from disk never takes longer than computing
        answers = an_engine(folder, clock=lambda: 0.0, adapters={"folder": own}, kv_dir=tmp_path / "kv")
        answers.answer("x", prompt, "x")
        assert answers.cached("x") == cached
        answers.engine.preserve(5)
        answers.engine.close()


def test_attention_of_a_mixture_can_be_adapted(tmp_path: Path) -> None:
    theirs = save_adapter(
        save_checkpoint(tmp_path / "base", "qwen3 moe"), tmp_path / "adapters" / "a", modules=ATTENTION
    )
    answers, prompt = an_engine(tmp_path), some_tokens(80)
    assert answers.answer("x", prompt, "a") == wanted(theirs, prompt)

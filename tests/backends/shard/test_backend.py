from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from backends.base import CacheKeeper, DraftedTokens, Leaver, Lender, Pinned, Prefilled, Prefiller
from backends.shard.backend import ShardBackend
from backends.shard.link import LinkOptions
from policies.errors import (
    BackendFailed,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unreached,
)
from policies.nouns import Capability, Delta, Grammar, Sampling, TokenLogprob, Usage
from policies.prefix.index import PrefixIndex
from shards.nouns import CacheChange, CacheEvent, DiskUse, GrammarForm, KvSource, Submission
from shards.scripted import ScriptedEngine, ScriptedModel, ScriptedOptions
from shards.server import ServerOptions, ShardServer
from shards.wire.facts import ShardFacts
from shards.wire.limits import PIN_PIECE_KEYS
from shards.wire.translate import pack_ids
from shards.wire.v1 import shard_pb2 as wire
from tests.backends.parts import END, a_model_folder, a_prompt, a_request, everything, ids_of, text_of
from tests.shards.attached import a_shard, eventually


class Notebook:
    """A CacheListener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, tuple[int, ...]]] = []

    def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        self.heard.append(("store", backend, tuple(keys)))

    def evict(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        self.heard.append(("evict", backend, tuple(keys)))

    def clear(self, backend: str) -> None:
        self.heard.append(("clear", backend, ()))


def answering(*texts: str) -> Any:
    """An engine's script: choice i draws the tokens of text i, then the special one."""

    def answer(submission: Submission, prompt: bytes, choice: int) -> tuple[int, ...]:
        return ids_of(texts[choice % len(texts)] + END)

    return answer


def an_engine(folder: Path, *texts: str, **options: Any) -> ScriptedEngine:
    model = ScriptedModel(path=a_model_folder(folder))
    return ScriptedEngine(answering(*texts or ("Hello, world",)), model=model, options=ScriptedOptions(**options))


@asynccontextmanager
async def a_backend(server: ShardServer, *, is_reached: bool = True, **parts: Any) -> AsyncIterator[ShardBackend]:
    options = LinkOptions(first_backoff_s=0.01, longest_backoff_s=0.02)
    backend = ShardBackend("b", server.address, pool="p", **{"options": options, **parts})
    await backend.start()
    try:
        if is_reached:
            await backend.probe()
        yield backend
        backend.check()
    finally:
        await backend.close()


async def test_a_prompt_becomes_text(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, "héllo 😀")
    async with a_shard(engine) as server, a_backend(server) as backend:
        deltas = await everything(backend, a_request(max_new_tokens=50), a_prompt("Tell me"))
        assert text_of(deltas) == "héllo 😀"
        assert deltas[0] == Delta(computed_tokens=7)
        assert tuple(token for delta in deltas for token in delta.token_ids) == ids_of("héllo 😀" + END)
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].usage == Usage(7, len(ids_of("héllo 😀")) + 1, 0)
        assert backend.open_requests == 0
        assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


async def test_what_was_asked_reaches_the_engine(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    sampling = Sampling(temperature=0.5, seed=-1, stop=("\n",), top_logprobs=None, logit_bias={3: 2.0}, choices=2)
    request = a_request(rank=3, deadline_s=60.0, prefill_slice_tokens=128, domain="acme", sampling=sampling)
    async with a_shard(engine) as server, a_backend(server) as backend:
        await everything(backend, request)
    (submission,) = engine.submitted
    assert (submission.rank, submission.prefill_slice, submission.domain, submission.choices) == (3, 128, "acme", 2)
    assert submission.deadline_s is not None
    assert (submission.sampling.seed, submission.sampling.stop) == (2**64 - 1, ("\n",))
    assert submission.sampling.logit_bias == {3: 2.0}


async def test_several_choices_end_each_and_usage_comes_with_the_last(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, "short", "rather long")
    async with a_shard(engine) as server, a_backend(server) as backend:
        deltas = await everything(backend, a_request(sampling=Sampling(choices=2)))
    assert (text_of(deltas, 0), text_of(deltas, 1)) == ("short", "rather long")
    assert [delta.choice for delta in deltas if delta.finish_reason] == [0, 1]
    assert deltas[-1].usage == Usage(5, 6 + 12, 0)


async def test_a_stop_string_ends_the_answer_and_is_not_shown(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, "one, two, three")
    async with a_shard(engine) as server, a_backend(server) as backend:
        deltas = await everything(backend, a_request(sampling=Sampling(stop=(", th", "zzz"))))
        assert text_of(deltas) == "one, two"
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].usage == Usage(5, len("one, two, th"), 0)
        await eventually(lambda: not engine.sequences and not server.service.open_requests)


async def test_logprobs_come_with_the_text_of_their_tokens(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, "a")
    async with a_shard(engine) as server, a_backend(server) as backend:
        deltas = await everything(backend, a_request(sampling=Sampling(top_logprobs=2)))
    a, b = ids_of("ab")
    first = next(delta for delta in deltas if delta.logprobs)
    assert first.logprobs == (TokenLogprob(a, "a", -0.5, (TokenLogprob(a, "a", -0.5), TokenLogprob(b, "b", -1.5))),)


async def test_an_index_that_holds_nothing_yet_hears_as_any_other(tmp_path: Path) -> None:
    index = PrefixIndex()
    assert not index, "it is empty, and so false"
    async with a_shard(an_engine(tmp_path)) as server, a_backend(server, listener=index) as backend:
        await everything(backend, prompt=a_prompt("x" * 200))
        await eventually(lambda: len(index) == 3)


async def test_the_second_question_is_reported_as_cached(tmp_path: Path) -> None:
    notebook, prompt = Notebook(), a_prompt("x" * 200)
    async with a_shard(an_engine(tmp_path)) as server, a_backend(server, listener=notebook) as backend:
        await everything(backend, prompt=prompt)
        deltas = await everything(backend, prompt=prompt)
    assert deltas[-1].usage == Usage(200, 13, 192)
    assert [(what, len(keys)) for what, _, keys in notebook.heard] == [("clear", 0), ("store", 3)]


async def test_a_long_prompt_flows_while_it_is_prefilled(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, window_tokens=512, prefill_tokens=200)
    most_ahead = 0
    extend = engine.extend

    def watched(key: Any, token_ids: bytes) -> None:
        nonlocal most_ahead
        extend(key, token_ids)
        sequence = engine.sequences[key]
        most_ahead = max(most_ahead, len(sequence.prompt) // 4 - sequence.computed_tokens)

    engine.extend = watched  # type: ignore[method-assign]
    async with a_shard(engine) as server, a_backend(server) as backend:
        prompt = a_prompt(token_ids=pack_ids([1] * 3900))
        deltas = await everything(backend, prompt=prompt)
    computed = [delta.computed_tokens for delta in deltas if delta.computed_tokens is not None]
    assert text_of(deltas) == "Hello, world"
    assert computed[-1] == 3900
    assert computed == sorted(computed)
    assert most_ahead <= 512


async def test_a_slow_reader_gets_bigger_deltas(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, "y" * 500)
    async with (
        a_shard(engine) as server,
        a_backend(server) as backend,
        aclosing(backend.generate(a_request(max_new_tokens=600), a_prompt())) as answer,
    ):
        first = await anext(answer)
        await eventually(lambda: not backend.open_requests)
        rest = [delta async for delta in answer]
    assert text_of([first, *rest]) == "y" * 500
    assert len(rest) <= 2


async def test_closing_the_iterator_cancels_down_to_the_engine(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    engine.is_held = True
    async with a_shard(engine) as server, a_backend(server) as backend:
        async with aclosing(backend.generate(a_request(), a_prompt())) as answer:
            await anext(answer)
        assert backend.open_requests == 0
        await eventually(lambda: len(engine.cancelled) == 1 and not server.service.open_requests)


async def test_cancelling_the_task_cancels_down_to_the_engine(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    engine.is_held = True
    async with a_shard(engine) as server, a_backend(server) as backend:
        asking = asyncio.create_task(everything(backend))
        await eventually(lambda: len(engine.sequences) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: len(engine.cancelled) == 1)


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_left_of_clients_that_leave_at_random(seed: int, tmp_path: Path) -> None:
    rng, engine = random.Random(seed), an_engine(tmp_path, "z" * 40)

    async def client(backend: ShardBackend) -> None:
        patience = rng.randrange(30)
        async with aclosing(backend.generate(a_request(), a_prompt("q" * rng.randrange(1, 300)))) as answer:
            async for _ in answer:
                patience -= 1
                if patience < 0:
                    return

    async with a_shard(engine) as server, a_backend(server) as backend:
        clients = [asyncio.create_task(client(backend)) for _ in range(40)]
        for leaving in rng.sample(clients, 15):
            await asyncio.sleep(rng.random() / 100)
            leaving.cancel()
        outcomes = await asyncio.gather(*clients, return_exceptions=True)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        backend.check()
        assert backend.open_requests == 0
        await eventually(lambda: not engine.sequences and not server.service.open_requests)


async def test_a_lost_stream_fails_every_open_request_at_once_and_comes_back(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    engine.is_held = True
    async with a_shard(engine) as server, a_backend(server) as backend:
        asking = [asyncio.create_task(everything(backend)) for _ in range(3)]
        await eventually(lambda: len(engine.sequences) == 3)
        server.service.end_all(*_lost())
        for failure in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(failure, BackendFailed)
            assert failure.retryable
        engine.is_held = False
        await eventually(lambda: "attached" in repr(backend))
        assert text_of(await everything(backend)) == "Hello, world"


def _lost() -> tuple[Any, str]:
    import grpc

    return grpc.StatusCode.UNAVAILABLE, "lost for a test"


async def test_a_restarted_shard_is_met_anew(tmp_path: Path) -> None:
    notebook, engine = Notebook(), an_engine(tmp_path)
    async with a_shard(engine) as server:
        address = server.address
        async with a_backend(server, listener=notebook) as backend:
            await everything(backend, prompt=a_prompt("x" * 100))
            await server.close()
            await eventually(lambda: "attached" not in repr(backend))
            with pytest.raises(BackendFailed):
                await everything(backend)
            again = ShardServer(an_engine(tmp_path), address, ServerOptions())
            await again.start()
            await eventually(lambda: "attached" in repr(backend))
            assert text_of(await everything(backend)) == "Hello, world"
            await again.close()
    assert [what for what, _, _ in notebook.heard] == ["clear", "store", "clear"]


async def test_evicted_and_cleared_blocks_are_reported_in_order(tmp_path: Path) -> None:
    class Forgetful(ScriptedEngine):
        def snapshot(self) -> tuple[CacheEvent, ...]:
            stored, evicted = CacheEvent(CacheChange.STORED, (1, 2)), CacheEvent(CacheChange.EVICTED, (2,))
            return stored, evicted, CacheEvent(CacheChange.CLEARED)

    notebook = Notebook()
    async with a_shard(Forgetful()) as server, a_backend(server, listener=notebook):
        await eventually(lambda: len(notebook.heard) == 4)
    assert notebook.heard == [("clear", "b", ()), ("store", "b", (1, 2)), ("evict", "b", (2,)), ("clear", "b", ())]


async def test_a_large_snapshot_is_heard_in_pieces_in_order_while_the_loop_turns() -> None:
    class Large(ScriptedEngine):
        def snapshot(self) -> tuple[CacheEvent, ...]:
            stored = (CacheEvent(CacheChange.STORED, tuple(range(start, start + 300))) for start in range(0, 9000, 300))
            return (
                *stored,
                CacheEvent(CacheChange.STORED, tuple(range(9000, 20_500))),
                CacheEvent(CacheChange.EVICTED, tuple(range(20_000, 20_500))),
            )

    class Rounds(Notebook):
        """Writes down how many keys it heard in each round of the loop."""

        def __init__(self) -> None:
            super().__init__()
            self.round, self.keys = 0, Counter[int]()

        def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
            super().store(backend, keys, tier)
            self.keys[self.round] += len(keys)

        async def turn(self) -> None:
            while True:
                self.round += 1
                await asyncio.sleep(0)

    notebook = Rounds()
    async with a_shard(Large()) as server:
        turning = asyncio.create_task(notebook.turn())
        async with a_backend(server, listener=notebook):
            await eventually(lambda: notebook.heard[-1:] and notebook.heard[-1][0] == "evict")
        turning.cancel()
    stored = [key for what, _, keys in notebook.heard[1:-1] for key in keys if what == "store"]
    assert stored == list(range(20_500))
    assert notebook.heard[-1] == ("evict", "b", tuple(range(20_000, 20_500)))
    assert max(notebook.keys.values()) <= 1000
    assert len(notebook.heard) < 60


async def test_a_shard_reports_its_model_and_its_load(tmp_path: Path) -> None:
    models = {"alias": "scripted", "other": "x"}
    reported: list[str] = []
    async with (
        a_shard(an_engine(tmp_path)) as server,
        a_backend(server, models=models, clock=lambda: 42.0, on_load=reported.append) as backend,
    ):
        described = backend.describe()
        await eventually(lambda: backend.load().reported_at == 42.0)
        load = backend.load()
        assert sorted(backend.assets()) == ["config.json", "tokenizer.json"]
        assert reported
        assert set(reported) == {"b"}
        assert backend.describe() is described
    assert described is not None
    assert described.models == {"alias"}
    assert (described.context_tokens, described.vocabulary, described.speaks_tokens) == (4096, 1000, True)
    assert (described.reports_cache, described.preempts) == (True, True)
    assert (load.running, load.free_tokens, load.max_requests) == (0, 1024 * 64, 64)


async def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    async with a_shard(ScriptedEngine()) as server, a_backend(server) as backend:
        deltas = await everything(backend, a_request(max_new_tokens=3), a_prompt(token_ids=pack_ids([5])))
    assert [token for delta in deltas for token in delta.token_ids] == [6, 7, 8]
    assert text_of(deltas) == ""
    assert deltas[-1].finish_reason == "length"


async def test_nothing_is_known_of_a_shard_that_was_never_reached() -> None:
    backend = ShardBackend("b", "127.0.0.1:1", pool="p")
    assert backend.describe() is None
    assert backend.load().running is None
    with pytest.raises(BackendFailed, match="no attempt to reach it"):
        await everything(backend)
    await backend.start()
    with pytest.raises(BackendFailed, match="cannot be reached"):
        await backend.probe()
    await backend.close()


async def test_a_draining_shard_reports_it_fails_its_probe_and_hands_requests_back(tmp_path: Path) -> None:
    async with a_shard(an_engine(tmp_path)) as server, a_backend(server) as backend:
        await everything(backend)
        assert not backend.load().draining
        await server.drain()
        async with asyncio.timeout(5):
            while not backend.load().draining:  # noqa: ASYNC110 - a socket announces nothing
                await asyncio.sleep(0)
        with pytest.raises(BackendFailed, match="about to stop"):
            await backend.probe()
        with pytest.raises(Unreached, match="about to stop"):
            await everything(backend)


@pytest.mark.parametrize(
    ("fields", "prompt", "kind"),
    [
        ({"max_new_tokens": 5000}, {}, ContextExceeded),
        ({}, {"token_ids": b""}, InvalidRequest),
        ({}, {"token_ids": b"abc"}, InvalidRequest),
        ({"max_new_tokens": -1}, {}, InvalidRequest),
        ({"deadline_s": 0.0}, {}, DeadlineExceeded),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_for_good(
    fields: dict[str, Any], prompt: dict[str, Any], kind: type[ExpectedError], tmp_path: Path
) -> None:
    async with a_shard(an_engine(tmp_path)) as server, a_backend(server) as backend:
        with pytest.raises(kind) as failure:
            await everything(backend, a_request(**fields), a_prompt(**prompt))
        assert not failure.value.retryable
        assert backend.open_requests == 0


async def test_a_full_shard_is_overloaded(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, max_running=1, max_waiting=0)
    engine.is_held = True
    async with (
        a_shard(engine) as server,
        a_backend(server) as backend,
        aclosing(backend.generate(a_request(), a_prompt())) as answer,
    ):
        await anext(answer)
        with pytest.raises(Overloaded):
            await everything(backend)


async def test_the_real_engine_answers_with_the_bundled_model() -> None:
    pytest.importorskip("torch")
    from shards.bundled import weights
    from shards.engine import Engine, EngineOptions
    from shards.model import Model

    model = Model.load(weights(), name="bundled")
    assert model.tokenizer is not None
    prompt = a_prompt(token_ids=pack_ids(model.tokenizer.encode("The key of the shed is " * 30).ids))
    server = ShardServer(Engine(model, EngineOptions(kv_blocks=64)), "127.0.0.1:0")
    await server.start()
    async with a_backend(server) as backend:
        request = a_request(max_new_tokens=8, sampling=Sampling(temperature=0.0))
        first, second = await everything(backend, request, prompt), await everything(backend, request, prompt)
        assert text_of(first) == text_of(second) != ""
        assert first[-1].usage is not None
        assert second[-1].usage is not None
        assert (first[-1].usage.cached_tokens, second[-1].usage.cached_tokens % 64) == (0, 0)
        assert second[-1].usage.cached_tokens > 0
        async with aclosing(backend.generate(a_request(max_new_tokens=300), prompt)) as answer:
            await anext(answer)
        await eventually(lambda: not server.service.open_requests)
        await server.check()
    await server.close()


async def test_a_prefix_is_pinned_and_let_go(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    engine.remember([1, 2, 3], "acme")
    async with a_shard(engine) as server, a_backend(server) as backend:
        await eventually(lambda: backend.load().pinnable_tokens == 512 * 64)
        assert isinstance(backend, CacheKeeper)
        assert await backend.pin("p", [1, 2, 3, 4], domain="acme", for_s=0.5) == Pinned(held=3, pinned=3)
        assert engine.pins == {"p": {1: 0.5, 2: 0.5, 3: 0.5}}
        assert await backend.unpin("p") == 3
        assert await backend.unpin("p") == 0


async def test_blocks_on_disk_are_reported_if_there_is_a_directory(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    async with a_shard(engine) as server, a_backend(server) as backend:
        await eventually(lambda: backend.load().running is not None)
        assert backend.load().disk_blocks == {}
    engine = an_engine(tmp_path)
    engine.disk = DiskUse(held=7, read=2)
    async with a_shard(engine) as server, a_backend(server) as backend:
        await eventually(lambda: bool(backend.load().disk_blocks))
        assert backend.load().disk_blocks == {
            "held": 7,
            "written": 0,
            "read": 2,
            "broken": 0,
            "failed": 0,
            "skipped": 0,
        }


async def test_drafted_tokens_are_reported_by_what_guessed_them(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    engine.drafts = (10, 7, 4, 3)
    async with a_shard(engine) as server, a_backend(server) as backend:
        await eventually(lambda: bool(backend.load().drafts))
        assert backend.load().drafts == {"prompt": DraftedTokens(6, 4), "model": DraftedTokens(4, 3)}


async def test_more_keys_than_a_message_holds_go_in_several(tmp_path: Path) -> None:
    engine, keys = an_engine(tmp_path), list(range(1, 2 * PIN_PIECE_KEYS))
    engine.pinnable = len(keys)
    engine.remember(keys, "acme")
    async with a_shard(engine) as server, a_backend(server) as backend:
        found = await backend.pin("p", keys, domain="acme", for_s=1e9)
        assert found == Pinned(len(keys), len(keys))
        assert len(engine.pins["p"]) == len(keys)


async def test_a_domain_is_cleared_and_the_listener_hears_what_went(tmp_path: Path) -> None:
    engine, notebook = an_engine(tmp_path), Notebook()
    engine.remember([1, 2], "acme")
    engine.remember([3], "labs")
    async with a_shard(engine) as server, a_backend(server, listener=notebook) as backend:
        assert await backend.clear_domain("acme") == 2
        await eventually(lambda: ("evict", "b", (1, 2)) in notebook.heard)


async def test_a_command_fails_when_its_stream_is_lost(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    async with a_shard(engine) as server, a_backend(server) as backend:
        engine.unpin = lambda _: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        with pytest.raises(BackendFailed, match="lost"):
            await backend.unpin("p")


async def test_a_command_that_is_never_answered_fails_in_time(tmp_path: Path) -> None:
    async with a_shard(an_engine(tmp_path)) as server:
        options = LinkOptions(answer_s=0.02)
        async with a_backend(server, options=options) as backend:
            server.loop.ask_in_turn = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign, assignment]
            with pytest.raises(BackendFailed, match=r"did not answer within 0\.02 s"):
                await backend.clear_domain("acme")


async def test_a_backend_without_a_connection_cannot_pin(tmp_path: Path) -> None:
    async with a_shard(an_engine(tmp_path)) as server:
        backend = ShardBackend("b", server.address, pool="p")
        with pytest.raises(BackendFailed):
            await backend.pin("p", [1], domain="", for_s=1.0)


class OlderFacts(ShardFacts):
    """The description of a shard from before these commands."""

    def welcome(self, snapshot: tuple[CacheEvent, ...]) -> wire.Welcome:
        welcome = super().welcome(snapshot)
        welcome.ClearField("keeps_cache")
        return welcome


async def test_a_shard_that_does_not_know_pins_is_never_asked_for_any(tmp_path: Path) -> None:
    async with a_shard(an_engine(tmp_path)) as server:
        server.service.facts = OlderFacts(**asdict(server.service.facts))
        async with a_backend(server) as backend:
            description = backend.describe()
            assert description is not None
            assert Capability.PINS not in description.capabilities
            assert backend.load().pinnable_tokens is None


async def test_only_a_shard_with_the_capability_is_asked_to_shape_an_answer(tmp_path: Path) -> None:
    shaped = Sampling(grammar=Grammar("json_schema", "{}", "response_format"))
    for shapes in (True, False):
        engine = an_engine(tmp_path)
        engine.shapes_answers = shapes
        async with a_shard(engine) as server, a_backend(server) as backend:
            description = backend.describe()
            assert description is not None
            assert (Capability.STRUCTURED_OUTPUT in description.capabilities) is shapes
            if shapes:
                await everything(backend, a_request(sampling=shaped), a_prompt())
                read = engine.submitted[-1].sampling.grammar
                assert read is not None
                assert (read.form, read.text) == (GrammarForm.JSON_SCHEMA, "{}")
            else:
                with pytest.raises(Unreached, match="cannot shape"):
                    await everything(backend, a_request(sampling=shaped), a_prompt())
                assert not engine.submitted


async def test_a_shard_without_a_port_for_kv_lends_nothing_and_belongs_to_no_group(tmp_path: Path) -> None:
    async with a_shard(an_engine(tmp_path)) as server, a_backend(server) as backend:
        assert (backend.kv_group, backend.lend(100), backend.load().fetched) == (None, None, None)
        assert isinstance(backend, Lender)


def an_exchanging_engine(tmp_path: Path) -> ScriptedEngine:
    """It claims to exchange KV, at any address of its machine."""
    model = ScriptedModel(path=a_model_folder(tmp_path))
    engine = ScriptedEngine(answering("Hello"), model=model, options=ScriptedOptions())
    engine.kv_address, engine.kv_group = ":7002", "ab" * 32
    return engine


async def test_a_shard_that_exchanges_kv_lends_at_its_own_host_and_is_told_where_to_fetch(tmp_path: Path) -> None:
    engine = an_exchanging_engine(tmp_path)
    async with a_shard(engine) as server, a_backend(server) as backend:
        assert backend.kv_group == "ab" * 32
        assert backend.lend(128) == {"address": "127.0.0.1:7002", "tokens": 128}
        prompt = replace(a_prompt("Tell me"), transfer={"address": "10.0.0.7:7002", "tokens": 64})
        await everything(backend, a_request(max_new_tokens=50), prompt)
    assert engine.submitted[0].source == KvSource("10.0.0.7:7002", 64)


async def test_a_shard_that_is_about_to_stop_gets_the_names_of_those_that_take_its_kv_once(tmp_path: Path) -> None:
    engine = an_exchanging_engine(tmp_path)
    leaving: list[str] = []
    async with a_shard(engine, grace_s=30) as server, a_backend(server, on_leaving=leaving.append) as backend:
        assert isinstance(backend, Leaver)
        await everything(backend, a_request(max_new_tokens=50), a_prompt("Tell me"))
        assert leaving == []
        draining = asyncio.create_task(server.drain())
        await eventually(lambda: bool(leaving))
        backend.hand_over([{"address": "10.0.0.7:7002", "tokens": 0}])
        await draining
        assert engine.handed_over == [("10.0.0.7:7002",)]
        assert leaving == [backend.name]
    backend.hand_over([])


async def test_a_shard_that_exchanges_no_kv_computes_no_prompts_for_others(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    async with a_shard(engine) as server, a_backend(server) as backend:
        with pytest.raises(BackendFailed, match="keeps no KV for others"):
            await backend.prefill(a_request(), a_prompt())
    assert not engine.submitted


async def test_a_prompt_that_is_computed_for_others_draws_one_plain_token(tmp_path: Path) -> None:
    engine = an_exchanging_engine(tmp_path)
    async with a_shard(engine) as server, a_backend(server) as backend:
        request = a_request(sampling=Sampling(temperature=0.5, min_new_tokens=9, choices=2))
        done = await backend.prefill(request, a_prompt("Tell me"))
        assert done == Prefilled({"address": "127.0.0.1:7002", "tokens": 7}, Usage(7, 1, 0))
        assert backend.open_requests == 0
    (submission,) = engine.submitted
    assert (submission.max_new_tokens, submission.choices) == (1, 1)
    assert submission.domain == request.domain
    assert isinstance(backend, Prefiller)

"""A shard's LoRA adapters are models of its backend, by the names that clients use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.errors import InvalidRequest, Unreached
from shards.nouns import AdapterUse
from shards.scripted import ScriptedEngine, ScriptedModel
from tests.backends.parts import a_model_folder, a_prompt, a_request, everything
from tests.backends.shard.test_backend import a_backend, answering
from tests.shards.attached import a_shard, eventually

USE = AdapterUse(("poem", "sql"), ("sql",), (), 4)


def an_engine(folder: Path, **parts: Any) -> ScriptedEngine:
    return ScriptedEngine(
        answering("Hello"), model=ScriptedModel(path=a_model_folder(folder)), **{"adapters": USE, **parts}
    )


async def test_adapters_are_models_and_requests_for_them_name_them(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    async with a_shard(engine) as server, a_backend(server) as backend:
        await eventually(lambda: backend.load().ready_adapters is not None)
        described = backend.describe()
        assert described is not None
        assert described.models == {"scripted", "poem", "sql"}
        assert (described.tuned, described.adapters) == ({"poem", "sql"}, {"poem", "sql"})
        load = backend.load()
        assert (load.ready_adapters, load.active_adapters, load.adapter_slots) == ({"sql"}, frozenset(), 4)
        for model in ("scripted", "sql", "poem"):
            await everything(backend, a_request(model=model, max_new_tokens=50), a_prompt())
    assert [submission.adapter for submission in engine.submitted] == ["", "sql", "poem"]


async def test_clients_may_call_adapters_and_model_otherwise_and_then_see_no_others(tmp_path: Path) -> None:
    engine, names = an_engine(tmp_path), {"base": "scripted", "base-sql": "sql"}
    async with a_shard(engine) as server, a_backend(server, models=names) as backend:
        await eventually(lambda: backend.load().ready_adapters is not None)
        described = backend.describe()
        assert described is not None
        assert (described.models, described.tuned) == ({"base", "base-sql"}, {"base-sql"})
        assert backend.load().ready_adapters == {"base-sql"}
        for model in ("base", "base-sql"):
            await everything(backend, a_request(model=model, max_new_tokens=50), a_prompt())
    assert [submission.adapter for submission in engine.submitted] == ["", "sql"]


async def test_adapters_come_and_go_while_the_shard_runs(tmp_path: Path) -> None:
    engine, heard = an_engine(tmp_path), list[str]()
    async with a_shard(engine) as server, a_backend(server, on_load=heard.append) as backend:
        await eventually(lambda: backend.load().ready_adapters == {"sql"})
        heard.clear()
        engine.adapter_use = AdapterUse(("poem",), ("poem",), (), 4)
        engine.wake()
        await eventually(lambda: backend.load().ready_adapters == {"poem"})
        described = backend.describe()
        assert described is not None
        assert described.models == {"scripted", "poem"}
        assert heard, "those that wait for it look again"
        with pytest.raises(Unreached, match="has no adapter 'sql' any more"):
            await everything(backend, a_request(model="sql"), a_prompt())
    assert not engine.submitted


async def test_a_request_for_an_adapter_is_not_answered_by_a_shard_that_was_started_without_it(tmp_path: Path) -> None:
    async with a_shard(an_engine(tmp_path)) as server, a_backend(server) as backend:
        await eventually(lambda: backend.load().ready_adapters is not None)
        assert backend.describe()
        address, shard = server.address, backend._link.shard
        await server.close()
        other = an_engine(tmp_path, adapters=None)
        other_server = type(server)(other, address, server._options)
        await other_server.start()
        try:
            await eventually(lambda: backend._link.shard is not shard)
            described = backend.describe()
            assert described is not None
            assert described.models == {"scripted"}
            with pytest.raises(Unreached, match="has no adapter 'sql' any more"):
                await everything(backend, a_request(model="sql"), a_prompt())
            assert backend.load().ready_adapters is None
        finally:
            await other_server.close()
    assert not other.submitted


async def test_a_router_that_attaches_later_hears_of_all_adapters(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    async with a_shard(engine) as server:
        async with a_backend(server) as first:
            engine.adapter_use = AdapterUse(("poem",), (), (), 4)
            engine.wake()
            await eventually(lambda: first.load().ready_adapters == frozenset())
        async with a_backend(server) as second:
            await eventually(lambda: second.load().ready_adapters is not None)
            described = second.describe()
            assert described is not None
            assert described.models == {"scripted", "poem"}


async def test_an_adapter_that_cannot_be_loaded_is_an_error_of_the_request(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    async with a_shard(engine) as server, a_backend(server) as backend:
        await eventually(lambda: backend.load().ready_adapters is not None)
        # it goes while the request is on its way
        engine.adapter_use = AdapterUse()
        with pytest.raises(InvalidRequest, match="there is no adapter sql"):
            await everything(backend, a_request(model="sql"), a_prompt())

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.sla.config import Config
from policies.sla.parse import parse
from router.start.commands.shard_options import link_options, shard_flags, shard_options
from router.start.commands.up import commands, with_addresses

SECRET = Path("/run/secret")
OPTIONS: dict[str, Any] = {"dtype": "int8", "kv-memory": "0.5", "deterministic": "true", "attach_s": "60"}


def a_config(**options: Any) -> Config:
    return parse(f"pools: {{own: {{local: 2, model: /m, options: {options}}}}}", source="sla.yaml", environment={})


def test_options_of_local_shards_become_flags_and_the_links_stay_with_the_router() -> None:
    config = a_config(**OPTIONS)
    first, second = commands(config, SECRET)
    line = first.line("127.0.0.1:0")
    assert line[line.index("--model") : line.index("--listen")] == ["--model", "/m"]
    assert line[line.index("--dtype") :] == ["--dtype", "int8", "--kv-memory", "0.5", "--deterministic"]
    assert (first.name, second.name, first.flags == second.flags) == ("own-0", "own-1", True)
    (pool,) = with_addresses(config, {"own-0": "h:1", "own-1": "h:2"}).pools.values()
    assert (pool.at, pool.options) == (("h:1", "h:2"), {"attach_s": "60"})


@pytest.mark.parametrize("threads", [None, 3])
def test_a_pools_threads_count_more_than_its_part_of_the_cores(threads: int | None) -> None:
    first, _ = commands(a_config(**({} if threads is None else {"threads": threads})), SECRET)
    line = first.line("127.0.0.1:0")
    # of a flag that is there twice, the last one counts
    last = len(line) - line[::-1].index("--threads")
    assert int(line[last]) == threads or (threads is None and line.count("--threads") == 1)


def test_the_processes_of_a_shard_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 13)
    text = "pools: {a: {local: 2, options: {tensor-parallel: 2}}, b: {local: 2}}"
    lines = [
        command.line("127.0.0.1:0") for command in commands(parse(text, source="sla.yaml", environment={}), SECRET)
    ]
    assert [line[line.index("--threads") + 1] for line in lines] == ["2"] * 4
    assert [line.count("--tensor-parallel") for line in lines] == [1, 1, 0, 0]


def test_shards_that_may_use_the_gpu_divide_it_and_those_on_the_cpu_do_not_count() -> None:
    text = "pools: {a: {local: 2}, b: {local: 1}, c: {local: 4, options: {device: cpu}}}"
    lines = [
        command.line("127.0.0.1:0") for command in commands(parse(text, source="sla.yaml", environment={}), SECRET)
    ]
    assert [line[line.index("--gpu-shards") + 1] for line in lines] == ["3"] * 7


def test_a_switch_that_is_off_is_no_flag() -> None:
    assert shard_flags({"deterministic": "false"}) == ()


def test_the_pools_own_fields_are_not_options() -> None:
    known = shard_options()
    assert {"dtype", "kv-dtype", "device", "threads", "kv-memory", "host-memory", "kv-dir", "step-ms"} <= set(known)
    assert not {"model", "listen", "name", "supervised", "register", "pool", "help"} & set(known)
    assert link_options({"model": "x", "dtype": "int8"}) == {"model": "x"}


def test_every_option_reaches_a_shard_as_a_flag_that_it_knows() -> None:
    values: dict[type, str] = {bool: "true"}
    options = {name: values.get(kind, "1") for name, kind in shard_options().items()}
    from typer.testing import CliRunner

    from shards.__main__ import app

    helped = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"})
    for flag in (word for word in shard_flags(options) if word.startswith("--")):
        assert f"{flag} " in helped.output

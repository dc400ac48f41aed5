"""The state folder: where it is, what has its place there, and what a router does that cannot use it."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from policies.errors import ConfigError
from policies.sla.changes import fixed_changes
from policies.sla.config import Config
from policies.sla.parse import parse
from router.start.config_file import ConfigFile
from router.start.state import PARTS, State, kept, name_for, name_of, state_of, usable, usual_folder


def test_the_folder_is_the_services_or_one_of_the_file_below_the_users_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/zoe")
    assert usual_folder({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "XDG_STATE_HOME": "/s"}, "x") == Path("/var/lib/a")
    assert usual_folder({"XDG_STATE_HOME": "/s"}, "x") == Path("/s/pointsman/x")
    assert usual_folder({"XDG_STATE_HOME": "relative"}, "x") == Path("/home/zoe/.local/state/pointsman/x")
    assert usual_folder({}, "x") == Path("/home/zoe/.local/state/pointsman/x")


def test_each_file_has_a_folder_of_its_own() -> None:
    names = {name_of(Path(path)) for path in ("/a/sla.yaml", "/b/sla.yaml", "/a/other.yaml", "/a/sla.yaml")}
    assert len(names) == 3
    assert all(name.startswith(("sla-", "other-")) for name in names)


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # a container with a number as user that its /etc/passwd does not have
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    assert usual_folder({}, "x") is None
    said: list[str] = []
    config = parse("")
    state = usable(state_of(config, lambda: None), config, said.append)
    assert state.fill(config).usage is None
    assert "this user has no home; set server.state to a folder, or to off" in said[0]


def test_every_part_has_its_place_there_unless_the_file_gives_another() -> None:
    config = State(Path("/s")).fill(parse("classes: {a: {}, last: {deadline: 1h}}"))
    assert config.usage is not None
    assert (config.usage.store, config.usage.journal) == ("/s/usage.sqlite", "/s/usage.sqlite.journal")
    assert config.audit is not None
    assert config.audit.file == "/s/audit.log"
    assert config.batches is not None
    assert (config.batches.store, config.batches.service_class, config.batches.window_s) == ("/s/batches", "last", 3600)
    assert (config.server.keys_file, config.server.state) == ("/s/keys.jsonl", "/s")
    named = """
usage: {store: u.sqlite}
audit: {file: a.log}
batches: {store: b}
server: {keys_file: k}
"""
    before = parse(named)
    after = State(Path("/s")).fill(before)
    assert (after.usage, after.audit, after.batches) == (before.usage, before.audit, before.batches)
    assert after.server.keys_file == "k"


def test_with_a_redis_keys_are_there_and_what_it_is_owed_is_in_the_folder() -> None:
    config = State(Path("/s")).fill(parse("store: {redis: 'redis://h'}"))
    assert (config.server.keys_file, config.store.journal) == (None, "/s/owed")
    assert State(Path("/s")).fill(parse("store: {redis: 'redis://h', journal: /j}")).store.journal == "/j"


@pytest.mark.parametrize("text", ["server: {state: off}", "server: {state: 'off'}"])
def test_off_keeps_nothing_without_a_section(text: str) -> None:
    config = parse(text)
    filled = usable(state_of(config, lambda: Path("/never")), config, pytest.fail).fill(config)
    assert filled == config
    assert (filled.usage, filled.audit, filled.batches, filled.server.keys_file) == (None, None, None, None)


def usual(folder: Path, config: Config | None = None) -> tuple[Config, list[str]]:
    """A Config with what can be kept in the usual `folder`, and what is said of it."""
    config, said = config or parse(""), list[str]()
    state = usable(state_of(config, lambda: folder), config, said.append)
    return state.fill(config), said


def test_a_new_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    config, said = usual(tmp_path / "a" / "b")
    assert not said
    assert config.server.state == str(tmp_path / "a" / "b")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_usual_folder_that_cannot_be_used_costs_a_warning_and_a_named_one_the_start(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    config, said = usual(tmp_path / "home" / "pointsman")
    assert config.server.state == "off"
    assert len(said) == 1
    assert said[0].startswith("Usage, issued keys, the audit log, batches and budgets end with this router: ")
    assert said[0].endswith(
        f"{tmp_path}/home/pointsman cannot be used: not a directory; set server.state to a folder, or to off."
    )
    with pytest.raises(ConfigError, match=r"server.state .*home/pointsman cannot be used: not a directory"):
        usual(Path("/never"), parse(f"server: {{state: {tmp_path}/home/pointsman}}"))


def _no_database(folder: Path) -> None:
    (folder / "usage.sqlite").write_bytes(b"no database\n" * 1000)


def _newer_usage(folder: Path) -> None:
    usual(folder)
    with sqlite3.connect(folder / "usage.sqlite") as database:
        database.execute("UPDATE pointsman_usage_version SET version = 99")
    database.close()


def _damaged_keys(folder: Path) -> None:
    (folder / "keys.jsonl").write_text("{}\n")


def _odd_audit(folder: Path) -> None:
    (folder / "audit.log").mkdir()


def _odd_batches(folder: Path) -> None:
    (folder / "batches").write_text("")


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (_no_database, "usage.sqlite"),
        (_newer_usage, "usage.sqlite"),
        (_damaged_keys, "keys.jsonl"),
        (_odd_audit, "audit.log"),
        (_odd_batches, "batches"),
    ],
)
def test_a_part_that_cannot_be_used_is_left_out_and_named(tmp_path: Path, spoil: object, part: str) -> None:
    assert callable(spoil)
    spoil(tmp_path)
    config, (said,) = usual(tmp_path)
    assert said.startswith(f"{tmp_path / part} is not used, and this router has none of it: ")
    present = {
        "usage.sqlite": config.usage,
        "keys.jsonl": config.server.keys_file,
        "audit.log": config.audit,
        "batches": config.batches,
    }
    assert present.keys() == PARTS
    assert [name for name, settings in present.items() if settings is None] == [part]
    with pytest.raises((ConfigError, OSError)):
        usual(tmp_path, parse(f"server: {{state: {tmp_path}}}"))


def test_a_file_that_changes_keeps_its_folder_and_parts(tmp_path: Path) -> None:
    (tmp_path / "sla.yaml").write_text("classes: {a: {}}")
    _odd_audit(tmp_path)
    contents = kept(ConfigFile(tmp_path / "sla.yaml", {}).read(), {"STATE_DIRECTORY": str(tmp_path)}, lambda _: None)
    (tmp_path / "sla.yaml").write_text("classes: {b: {}}")
    changed = contents.source.read()
    assert list(changed.config.classes) == ["b"]
    assert (changed.config.usage, changed.config.audit) == (contents.config.usage, None)
    assert fixed_changes(contents.config, changed.config, text=changed.text, source="f") == ()
    (tmp_path / "sla.yaml").write_text("server: {state: /elsewhere}")
    moved = contents.source.read()
    (line,) = fixed_changes(contents.config, moved.config, text=moved.text, source="f")
    assert line.startswith("f:1: server.state: cannot change while the router runs")


def test_names_of_routers_without_a_file_tell_them_apart() -> None:
    assert name_for("to", "http://a") != name_for("to", "http://b")

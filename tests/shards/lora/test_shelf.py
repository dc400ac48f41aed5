"""The shelf of adapters, with files that are only described: bounds, order and ends in random histories."""

from __future__ import annotations

import random
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.lora.adapter import Adapter, LowRank
from shards.lora.options import AdapterOptions, named_folders
from shards.lora.shelf import AdapterShelf, CannotLoad
from shards.network.errors import BrokenCheckpoint

SIZE = 4


class Later(Executor):
    """Runs each call when it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, fn, args))
        assert not kwargs
        return future

    def run(self, most: int = 100) -> None:
        for future, fn, args in self.calls[:most]:
            try:
                future.set_result(fn(*args))
            except Exception as error:
                future.set_exception(error)
        del self.calls[:most]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class Described:
    """Reads files that contain a number: the bytes of the adapter; a negative one is broken."""

    def size(self, folder: Path) -> int:
        return abs(int((folder / "adapter_model.safetensors").read_text()))

    def read(self, folder: Path, name: str) -> Adapter:
        number = int((folder / "adapter_model.safetensors").read_text())
        if number < 0:
            raise BrokenCheckpoint("it is broken")
        return Adapter(name, f"{name} {number}", {"0.down": LowRank(torch.zeros(number, dtype=torch.int8), ())})


def write(folder: Path, name: str, number: int = SIZE) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "adapter_config.json").write_text("{}")
    (folder / name / "adapter_model.safetensors").write_text(f"{number:+09d}")


def a_shelf(folder: Path, **options: Any) -> tuple[AdapterShelf, Later]:
    later = Later()
    return AdapterShelf(AdapterOptions(folder=folder, **options), Described(), thread=later), later


@pytest.mark.parametrize("seed", range(20))
def test_any_history_keeps_the_bounds_and_starts_every_request_with_its_adapter(tmp_path: Path, seed: int) -> None:
    rng, names = random.Random(seed), [f"a{number}" for number in range(5)]
    for name in names:
        write(tmp_path, name, rng.randint(1, 8))
    shelf, later = a_shelf(tmp_path, most=3, most_bytes=16, look_s=1)
    waiting: dict[int, str] = {}
    running: dict[int, str] = {}
    for step in range(200):
        action = rng.random()
        if action < 0.4:
            waiting[step] = rng.choice(names)
            if shelf.objection(waiting[step]) is None:
                shelf.ask(step, waiting[step])
            else:
                del waiting[step]
        elif action < 0.7 and (waiting or running):
            key = rng.choice([*waiting, *running])
            shelf.leave(key)
            waiting.pop(key, None), running.pop(key, None)
        elif action < 0.8:
            write(tmp_path, rng.choice(names), rng.randint(1, 8))
        later.run(rng.randint(0, 2))
        for key, outcome in shelf.answers(float(step)):
            assert isinstance(outcome, Adapter)
            assert outcome.name == waiting[key]
            running[key] = waiting.pop(key)
        shelf.take_replaced()
        shelf.check()
        assert set(shelf.use.active) >= set(waiting.values())
    for key in [*running, *waiting]:
        shelf.leave(key)
    shelf.answers(1000.0)
    assert shelf.use.active == ()
    shelf.check()


def test_nothing_starves_while_there_is_room_for_one(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path, name)
    shelf, later = a_shelf(tmp_path, most=1)
    for number, name in enumerate("abcabc"):
        shelf.ask(number, name)
    served: list[int] = []
    for step in range(40):
        later.run()
        for key, _ in shelf.answers(float(step)):
            assert isinstance(key, int)
            served.append(key)
            shelf.leave(key)
    assert sorted(served) == list(range(6))


def test_an_adapter_that_was_loaded_for_a_request_that_went_can_be_dropped(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name)
    shelf, later = a_shelf(tmp_path, most=1)
    shelf.ask(1, "a")
    shelf.answers(0.0)
    shelf.leave(1)
    later.run()
    shelf.ask(2, "b")
    assert shelf.answers(0.1) == []
    later.run()
    assert [key for key, _ in shelf.answers(0.2)] == [2]


def test_an_adapter_that_is_removed_ends_its_waiting_requests_and_not_its_running_ones(tmp_path: Path) -> None:
    write(tmp_path, "a")
    shelf, later = a_shelf(tmp_path, look_s=1)
    shelf.ask(1, "a")
    shelf.answers(0.0)
    later.run()
    assert [key for key, _ in shelf.answers(0.1)] == [1]
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    (tmp_path / "a").rmdir()
    shelf.answers(1.5)
    shelf.ask(2, "a")
    later.run()
    shelf.leave(2)
    shelf.answers(1.6)
    assert shelf.take_replaced() == ["a 4"]
    assert shelf.objection("a") == "this shard has no adapter 'a'; it has none"
    assert shelf.nbytes == SIZE, "the request that runs with it keeps it"
    shelf.leave(1)
    shelf.answers(1.7)
    assert shelf.nbytes == 0


def test_a_removed_adapter_is_an_answer_to_those_that_wait_for_it(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name)
    shelf, later = a_shelf(tmp_path, look_s=1, most=1)
    shelf.ask(1, "a")
    shelf.answers(0.0)
    later.run()
    assert [key for key, _ in shelf.answers(0.1)] == [1]
    shelf.ask(2, "b")
    (tmp_path / "b" / "adapter_config.json").unlink()
    shelf.answers(1.5)
    later.run()
    ((key, outcome),) = shelf.answers(1.6)
    assert key == 2
    assert isinstance(outcome, CannotLoad)
    assert str(outcome) == "the adapter 'b' was removed"


def test_a_broken_adapter_is_tried_again_when_its_files_change(tmp_path: Path) -> None:
    write(tmp_path, "a", -4)
    shelf, later = a_shelf(tmp_path, look_s=1)
    assert shelf.use.known == ("a",)
    shelf.ask(1, "a")
    shelf.answers(0.0)
    later.run()
    ((_, outcome),) = shelf.answers(0.1)
    assert str(outcome) == "the adapter 'a' cannot be loaded: it is broken"
    assert shelf.use.known == (), "routers send no further requests for it"
    write(tmp_path, "a", 5)
    shelf.answers(1.5)
    later.run()
    shelf.answers(1.6)
    assert shelf.use.known == ("a",)


def test_changes_are_told_once(tmp_path: Path) -> None:
    write(tmp_path, "a")
    shelf, later = a_shelf(tmp_path)
    assert shelf.take_change() == shelf.use
    assert shelf.take_change() is None
    shelf.ask(1, "a")
    assert shelf.take_change() == shelf.use._replace(active=("a",), loaded=())
    shelf.answers(0.0)
    later.run()
    shelf.answers(0.1)
    assert shelf.take_change() == shelf.use._replace(active=("a",), loaded=("a",))
    shelf.leave(2)
    assert shelf.take_change() is None


def test_a_folder_that_cannot_be_listed_for_a_while_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "adapters", "a")
    shelf, later = a_shelf(tmp_path / "adapters", look_s=1)
    (tmp_path / "adapters").rename(tmp_path / "away")
    shelf.answers(1.5)
    later.run()
    shelf.answers(1.6)
    assert shelf.use.known == ("a",)


def test_names_of_options_are_read(tmp_path: Path) -> None:
    assert named_folders(["a=x=y", f"b={tmp_path}"]) == {"a": Path("x=y"), "b": tmp_path}
    for wrong in ("a", "=x", "a="):
        with pytest.raises(ValueError, match="must be NAME=DIR"):
            named_folders([wrong])

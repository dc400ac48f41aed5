"""An engine with a directory for KV, and shards as processes that follow one another on one."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import grpc
import pytest

from shards.bundled import weights
from shards.engine import Engine, EngineOptions
from shards.exec.fake import FakeNetwork
from shards.model import Model
from shards.nouns import DiskUse
from shards.wire import limits
from tests.shards.attached import HandRouter
from tests.shards.driver import Driver, packed, some_tokens
from tests.shards.test_deterministic import ask, drawn_by, model

__all__ = ["model"]


def a_driver(path: Path, **options: object) -> Driver:
    return Driver(**{"kv_blocks": 16, "kv_dir": path, **options})  # type: ignore[arg-type]


def answered(driver: Driver, key: str, prompt: list[int], **more: object) -> int:
    """The number of cached tokens of one request, which must get the answer that it gets without any cache."""
    driver.ask(key, prompt, **more)
    driver.run()
    assert driver.drawn[key, 0] == FakeNetwork().answer(prompt, 5)
    return driver.ended[key, 0].cached_tokens


def test_a_prompt_is_read_from_disk_after_a_restart(tmp_path: Path) -> None:
    prompt = some_tokens(600)
    first = a_driver(tmp_path)
    assert answered(first, "it", prompt) == 0
    assert first.engine.preserve(5.0) == 9
    first.engine.close()
    later = a_driver(tmp_path)
    later.step()
    assert len(later.tiers["disk"]) == 9
    assert answered(later, "it", prompt) == 9 * 64
    assert len(later.tiers["device"]) == len(later.tiers["host"]) == 9
    assert later.load is not None
    assert later.load.disk == DiskUse(held=9, read=9)
    assert answered(later, "longer", [*prompt, *some_tokens(100, 1)]) >= 9 * 64


def test_a_killed_engine_leaves_the_blocks_that_had_left_the_device(tmp_path: Path) -> None:
    prompts = [some_tokens(600, seed) for seed in range(4)]
    first = a_driver(tmp_path)
    for number, prompt in enumerate(prompts):
        answered(first, f"{number}", prompt)
    assert first.worker is not None
    first.worker.die()
    later = a_driver(tmp_path)
    assert answered(later, "it", prompts[0]) == 9 * 64


def test_other_domains_models_and_weights_find_nothing(tmp_path: Path) -> None:
    prompt = some_tokens(200)
    first = a_driver(tmp_path)
    answered(first, "it", prompt, domain="acme")
    first.engine.preserve(5.0)
    first.engine.close()
    later = a_driver(tmp_path)
    assert answered(later, "other", prompt, domain="other") == 0
    assert answered(later, "same", prompt, domain="acme") == 192
    later.engine.close()
    deterministic = a_driver(tmp_path, deterministic=True)
    assert answered(deterministic, "it", prompt, domain="acme") == 0


def test_a_cleared_domain_is_deleted_from_disk(tmp_path: Path) -> None:
    driver = a_driver(tmp_path)
    answered(driver, "it", some_tokens(200), domain="acme")
    driver.engine.preserve(5.0)
    assert driver.engine.clear_cache("acme") == 3
    driver.run()
    driver.step()
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone"])
def test_a_damaged_block_is_computed_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    prompt = some_tokens(600)
    first = a_driver(tmp_path)
    answered(first, "it", prompt)
    first.engine.preserve(5.0)
    first.engine.close()
    later = a_driver(tmp_path)
    for path in sorted(tmp_path.rglob("*.kv"))[::2]:
        data = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:-9] if damage == "truncated" else data[:-9] + b"damaged!!")
    with caplog.at_level(logging.WARNING):
        assert answered(later, "it", prompt) < 9 * 64
    assert "computed again" in caplog.text


def test_a_full_disk_does_not_hurt_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = a_driver(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    assert driver.worker is not None
    monkeypatch.setattr(driver.worker.files, "write", full)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            answered(driver, f"{number}", some_tokens(600, number))
    assert caplog.text.count("No space left on device") >= 1
    driver.assert_nothing_is_held()


def test_reading_that_is_slower_than_computing_is_not_waited_for(tmp_path: Path) -> None:
    prompt = some_tokens(600)
    first = a_driver(tmp_path)
    answered(first, "it", prompt)
    first.engine.preserve(5.0)
    first.engine.close()
    later = a_driver(tmp_path)
    later.engine._pool.disk._time.block_s = 10.0
    assert answered(later, "it", prompt) == 0


def test_a_disk_that_hangs_delays_a_prompt_by_no_more_than_computing_it(tmp_path: Path) -> None:
    prompt = some_tokens(600)
    first = a_driver(tmp_path)
    answered(first, "it", prompt)
    first.engine.preserve(5.0)
    first.engine.close()
    later = a_driver(tmp_path)
    assert later.worker is not None
    later.worker.outcomes = list  # type: ignore[method-assign]
    later.ask("it", prompt)
    for _ in range(50):
        later.step()
        later.clock.now_s += 0.01
    assert later.ended["it", 0].cached_tokens == 0
    assert later.drawn["it", 0] == FakeNetwork().answer(prompt, 5)


def test_random_requests_of_four_engines_on_one_directory_get_right_answers(tmp_path: Path) -> None:
    rng = random.Random(0)
    prompts = [some_tokens(rng.randint(70, 500), seed) for seed in range(12)]
    read = 0
    for life in range(4):
        driver = a_driver(tmp_path, kv_blocks=24, max_running=3, kv_dir_bytes=60 * 4096)
        asked: dict[str, tuple[list[int], str]] = {}
        for number in range(60):
            prompt = rng.choice(prompts)[: rng.randint(65, 500)]
            domain = rng.choice("ab")
            asked[f"{number}"] = (prompt, domain)
            driver.ask(f"{number}", prompt, rank=rng.randint(0, 2), domain=domain)
            if rng.random() < 0.1:
                driver.engine.cancel(rng.choice(list(asked)))
            for _ in range(rng.randint(0, 12)):
                driver.step()
        driver.run()
        for key, (prompt, _) in asked.items():
            expected = FakeNetwork().answer(prompt, 5)
            assert driver.drawn[key, 0] == expected[: len(driver.drawn[key, 0])]
        read += driver.engine._pool.disk.counts.read
        if life % 2:
            driver.engine.preserve(5.0)
            driver.engine.close()
        elif driver.worker is not None:
            driver.worker.die()
    assert read > 100


def test_a_directory_needs_weights_with_an_identity_room_and_a_place(tmp_path: Path) -> None:
    nameless = Model("m", FakeNetwork())
    with pytest.raises(ValueError, match="made in memory"):
        Engine(nameless, EngineOptions(kv_blocks=4, kv_dir=tmp_path))
    with pytest.raises(ValueError, match="hold no KV block"):
        a_driver(tmp_path, kv_dir_bytes=10)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        a_driver(tmp_path / "file")


def test_blocks_from_disk_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    """As `tests/shards/test_deterministic.py`: tokens and 20 logprobs of each, of a random network and a real one."""
    for path in (model, weights()):
        network = Model.load(path).network
        options = {"kv_blocks": 60, "kv_dir": tmp_path / path.name, "deterministic": True}
        first = Driver(network, **options)
        ask(first)
        first.run()
        first.engine.preserve(20.0)
        first.engine.close()
        later = Driver(Model.load(path).network, **options)
        ask(later)
        later.run()
        assert later.ended["it", 0].cached_tokens == 256
        assert drawn_by(later) == drawn_by(first)


async def cached_tokens(path: Path, prompt: list[int], model_folder: Path) -> int:
    """Start a shard, ask it one prompt, stop it in an orderly way, and return the prompt's cached tokens."""
    command = [*("-P", "-m", "shards", "--model", str(model_folder), "--device", "cpu", "--threads", "1")]
    command += [*("--listen", "127.0.0.1:0", "--kv-dir", str(path), "--kv-dir-gib", "0.1", "--kv-memory", "0.05")]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    line = ""
    while " on 127.0.0.1:" not in line:
        line = (await process.stderr.readline()).decode()
        assert line, "the shard did not start"
    async with grpc.aio.insecure_channel(line.rpartition(" ")[2].strip(), options=limits.CLIENT_OPTIONS) as channel:
        router = HandRouter(channel)
        await router.hello()
        await router.ask(1, prompt)
        cached: int = (await router.until_finished(1)).cached_tokens
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 0
    return cached


@pytest.mark.timeout(120)
async def test_a_shard_that_is_started_again_has_its_first_prompt_on_disk(model: Path, tmp_path: Path) -> None:
    prompt = [3 + token % 50 for token in some_tokens(400)]
    assert packed(prompt)
    assert await cached_tokens(tmp_path, prompt, model) == 0
    assert await cached_tokens(tmp_path, prompt, model) == 384


@pytest.mark.timeout(120)
async def test_a_shard_whose_weights_were_replaced_in_place_uses_no_kv_of_the_old_ones(
    model: Path, tmp_path: Path
) -> None:
    folder, kept = Path(shutil.copytree(model, tmp_path / "model")), tmp_path / "kv"
    prompt = [3 + token % 50 for token in some_tokens(400)]
    assert await cached_tokens(kept, prompt, folder) == 0
    # one number of one row, with the old size and time
    weights_file = folder / "model.safetensors"
    before = weights_file.stat()
    with weights_file.open("r+b") as file:
        file.seek(before.st_size - 100)
        file.write(b"\x00\x3f")
    os.utime(weights_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await cached_tokens(kept, prompt, folder) == 0
    assert await cached_tokens(kept, prompt, folder) == 384

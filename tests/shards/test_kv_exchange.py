"""Two engines that exchange KV: what one has computed, the other fetches, and nothing else."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from shards.bundled import weights
from shards.exec.fake import FakeNetwork
from shards.kv import peer_wire
from shards.kv.peer_identity import PeerIdentity, key_of
from shards.kv.peer_wire import Offer, OfferedBlock, PeerRefused, greet, take
from shards.kv.raw_block import BlockLabels, BrokenBlock
from shards.model import Model
from shards.nouns import KvSource
from shards.wire import limits
from shards.wire.v1 import shard_pb2 as wire
from tests.shards.attached import HandRouter
from tests.shards.driver import Driver, some_tokens
from tests.shards.test_deterministic import PROMPT, ask, drawn_by, model

__all__ = ["model"]

SECRET = b"of the shards"
HERE = ("127.0.0.1", 0)
LIMIT_S = 10.0


@contextmanager
def drivers(*options: dict[str, object]) -> Iterator[list[Driver]]:
    """Engines that listen, each with its own options."""
    made = [Driver(**{"kv_listen": HERE, "kv_secret": SECRET, **each}) for each in options]  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for driver in made:
            driver.engine.close()


def address_of(driver: Driver) -> str:
    assert driver.engine.kv_address is not None
    return driver.engine.kv_address


def at(driver: Driver) -> tuple[str, int]:
    host, _, port = address_of(driver).rpartition(":")
    return host, int(port)


def work(*running: Driver, until: str, check: bool = True) -> None:
    """Step all engines until the first has ended the request `until`."""
    until_s = time.monotonic() + LIMIT_S
    while (until, 0) not in running[0].ended:
        for driver in running:
            driver.step(check=check)
        assert time.monotonic() < until_s, f"{running[0].engine!r} does not end {until}"
        # the threads that send and receive have their turn
        time.sleep(0.0005)


def answered(*running: Driver, key: str, prompt: list[int], **more: object) -> int:
    """The cached tokens of one request at the first engine, which gets the answer that it gets without any cache."""
    running[0].ask(key, prompt, **more)
    work(*running, until=key)
    assert running[0].drawn[key, 0] == FakeNetwork().answer(prompt, 5)
    return running[0].ended[key, 0].cached_tokens


def test_a_prompt_is_fetched_from_the_shard_that_computed_it() -> None:
    prompt = some_tokens(600)
    with drivers({}, {}) as (owner, other):
        assert answered(owner, key="it", prompt=prompt) == 0
        source = KvSource(address_of(owner), 600)
        assert answered(other, owner, key="it", prompt=prompt, source=source) == 9 * 64
        assert len(other.tiers["device"]) == 9
        assert other.load is not None
        assert other.load.peers is not None
        assert (other.load.peers.blocks, other.load.peers.failed) == (9, 0)
        assert answered(other, owner, key="longer", prompt=[*prompt, *some_tokens(100, 1)]) == 9 * 64


def test_blocks_of_the_host_tier_are_lent_too() -> None:
    prompts = [some_tokens(600, seed) for seed in range(4)]
    with drivers({"kv_blocks": 16}, {}) as (owner, other):
        for number, prompt in enumerate(prompts):
            answered(owner, key=f"{number}", prompt=prompt)
        assert owner.tiers["host"] - owner.tiers["device"]
        source = KvSource(address_of(owner), 600)
        assert answered(other, owner, key="it", prompt=prompts[0], source=source) == 9 * 64


def test_the_part_that_the_source_has_is_fetched_and_the_rest_is_computed() -> None:
    prompt = some_tokens(1000)
    with drivers({}, {}) as (owner, other):
        answered(owner, key="half", prompt=prompt[:500])
        source = KvSource(address_of(owner), 1000)
        assert answered(other, owner, key="it", prompt=prompt, source=source) == 7 * 64


def test_another_domain_gets_nothing() -> None:
    prompt = some_tokens(300)
    with drivers({}, {}) as (owner, other):
        answered(owner, key="it", prompt=prompt, domain="acme")
        source = KvSource(address_of(owner), 300)
        assert answered(other, owner, key="other", prompt=prompt, domain="evil", source=source) == 0
        assert answered(other, owner, key="same", prompt=prompt, domain="acme", source=source) == 4 * 64


@pytest.mark.parametrize(
    ("options", "why"),
    [({"kv_secret": b"another"}, "secret"), ({"deterministic": True}, "another model, type, layout")],
)
def test_a_shard_of_another_kind_or_secret_is_refused_and_computes(
    options: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = some_tokens(300)
    with drivers({}, options) as (owner, other):
        answered(owner, key="it", prompt=prompt)
        assert answered(other, owner, key="it", prompt=prompt, source=KvSource(address_of(owner), 300)) == 0
    assert why in caplog.text
    assert "is computed" in caplog.text


def test_a_dead_peer_means_computing_and_is_not_asked_again_at_once() -> None:
    prompt = some_tokens(300)
    with drivers({}) as (other,), socket.create_server(HERE) as gone:
        source = KvSource(f"127.0.0.1:{gone.getsockname()[1]}", 300)
        gone.close()
        assert answered(other, key="it", prompt=prompt, source=source) == 0
        failed = other.engine._pool.peers.use
        assert failed is not None
        assert failed.failed > 0
        assert answered(other, key="next", prompt=some_tokens(300, 1), source=source) == 0
        assert other.engine._pool.peers.use == failed


def test_a_source_that_stops_lending_while_it_sends_means_computing_the_rest() -> None:
    prompt = some_tokens(2000)
    with drivers({}, {}) as (owner, other):
        answered(owner, key="it", prompt=prompt)
        other.ask("it", prompt, source=KvSource(address_of(owner), 2000))
        for _ in range(5):
            other.step()
            owner.step()
        owner.engine.close()
        work(other, until="it")
        assert other.drawn["it", 0] == FakeNetwork().answer(prompt, 5)


def test_a_cleared_domain_keeps_nothing_of_what_is_on_its_way() -> None:
    prompt = some_tokens(300)
    with drivers({}, {}) as (owner, other):
        answered(owner, key="it", prompt=prompt)
        other.ask("it", prompt, source=KvSource(address_of(owner), 300))
        other.step()
        assert other.engine._pool.peers.is_busy
        other.engine.clear_cache()
        other.engine.cancel("it")
        until_s = time.monotonic() + LIMIT_S
        while other.engine._pool.peers.is_busy:
            owner.step()
            other.step()
            assert time.monotonic() < until_s
        assert not other.held


def test_a_stranger_is_refused_before_it_learns_anything() -> None:
    labels = BlockLabels("m", bytes(32))
    with drivers({}) as (owner,):
        for identity, why in (
            (PeerIdentity(bytes(32), key_of(SECRET)), "another model"),
            (PeerIdentity(bytes.fromhex(owner.engine.kv_group or ""), b"guess"), "secret"),
        ):
            with socket.create_connection(at(owner), 5) as connection:
                connection.settimeout(5)
                with pytest.raises(PeerRefused, match=why):
                    greet(connection, identity)
        with socket.create_connection(at(owner), 5) as connection:
            connection.settimeout(5)
            peer_wire.ask(connection, [labels.first(bytes(256), domain="")])
            with pytest.raises((OSError, BrokenBlock)):
                take(connection, [memoryview(bytearray(8))])
            assert owner.engine._pool.lending.is_busy is False


def leave(leaver: Driver, *heirs: Driver) -> None:
    """Let `leaver` hand its blocks over, and step all until that is over."""
    leaver.engine.hand_over([address_of(heir) for heir in heirs], within_s=LIMIT_S)
    until_s = time.monotonic() + LIMIT_S
    while leaver.engine.is_handing_over or any(heir.engine._pool.peers.is_busy for heir in heirs):
        for driver in (leaver, *heirs):
            driver.step()
        assert time.monotonic() < until_s
        time.sleep(0.0005)


def test_a_shard_that_leaves_hands_its_blocks_over() -> None:
    prompts = [some_tokens(600, seed) for seed in range(6)]
    with drivers({}, {"host_bytes": 1 << 20}, {"host_bytes": 1 << 20}) as (leaver, *heirs):
        for number, prompt in enumerate(prompts):
            answered(leaver, key=f"{number}", prompt=prompt, domain="ab"[number % 2])
        leave(leaver, *heirs)
        for number, prompt in enumerate(prompts):
            found = [answered(heir, key=f"{number}", prompt=prompt, domain="ab"[number % 2]) for heir in heirs]
            assert max(found) == 9 * 64
            assert answered(heirs[0], key=f"x{number}", prompt=prompt, domain="other") == 0
        for heir in heirs:
            heir.assert_nothing_is_held()


def test_blocks_that_are_handed_over_fill_free_room_before_they_replace_older_ones() -> None:
    prompts = [some_tokens(64 * 20 + 10, seed) for seed in range(8)]
    small = {"kv_blocks": 24, "host_bytes": 0}
    with drivers({"kv_blocks": 100}, small, small) as (leaver, full, empty):
        for number, prompt in enumerate(prompts[:5]):
            answered(full, key=f"{number}", prompt=prompt)
        assert not full.engine._pool.host.free
        for number, prompt in enumerate(prompts[5:]):
            answered(leaver, key=f"{number}", prompt=prompt)
        leave(leaver, full, empty)
        assert len(empty.tiers["host"]) == 3 * 20
        assert not full.engine._pool.peers.use.taken_over  # type: ignore[union-attr]


def test_a_second_leaving_and_one_without_a_port_do_nothing() -> None:
    with drivers({}, {}) as (leaver, heir):
        answered(leaver, key="it", prompt=some_tokens(600))
        leave(leaver)
        leave(leaver, heir)
        assert not heir.engine._pool.peers.is_busy
        assert len(heir.tiers["host"]) == 0
    alone = Driver()
    alone.engine.hand_over(["127.0.0.1:1"], within_s=1.0)
    assert not alone.engine.is_handing_over
    alone.engine.close()


def test_a_leaver_that_dies_while_it_hands_over_loses_nothing_else() -> None:
    prompts = [some_tokens(900, seed) for seed in range(4)]
    with drivers({}, {"host_bytes": 1 << 20}) as (leaver, heir):
        for number, prompt in enumerate(prompts):
            answered(leaver, key=f"{number}", prompt=prompt)
        leaver.engine.hand_over([address_of(heir)], within_s=LIMIT_S)
        until_s = time.monotonic() + LIMIT_S
        while not heir.engine._pool.peers.is_busy:
            leaver.step()
            heir.step()
            assert time.monotonic() < until_s
        leaver.engine.close()
        while heir.engine._pool.peers.is_busy:
            heir.step()
            assert time.monotonic() < until_s
        for number, prompt in enumerate(prompts):
            answered(heir, key=f"{number}", prompt=prompt)
        heir.assert_nothing_is_held()


def test_a_shard_that_stops_takes_no_offers() -> None:
    with drivers({}, {}) as (leaver, heir):
        answered(leaver, key="it", prompt=some_tokens(600))
        heir.engine._pool.peers.close()
        offered = Offer("127.0.0.1:1", "", True, [OfferedBlock(-1, 0.0, bytes(256))])
        assert heir.engine._pool.peers.ask(offered).wait(LIMIT_S) == [False]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_at_both_ends_nothing_is_lost_and_every_answer_is_right(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [some_tokens(rng.randrange(100, 900), number) for number in range(6)]
    small = {"kv_blocks": 24, "host_bytes": rng.choice([0, 1 << 16])}
    with drivers(small, small, small) as made:
        asked: dict[tuple[Driver, str], tuple[list[int], str]] = {}
        for number in range(60):
            driver, prompt = rng.choice(made), rng.choice(prompts)
            domain, key = rng.choice(["a", "b"]), f"{number}"
            source = KvSource(address_of(rng.choice(made)), rng.randrange(1000))
            driver.ask(key, prompt, domain=domain, source=source)
            asked[driver, key] = (prompt, domain)
            for _ in range(rng.randrange(6)):
                rng.choice(made).step()
            if rng.random() < 0.15:
                driver.engine.cancel(key)
                del asked[driver, key]
            if rng.random() < 0.05:
                rng.choice(made).engine.clear_cache(domain)
            if number == 40:
                heirs = [address_of(each) for each in made if each is not driver]
                driver.engine.hand_over(heirs, within_s=LIMIT_S)
        until_s = time.monotonic() + LIMIT_S
        while any((key, 0) not in driver.ended for driver, key in asked):
            for driver in made:
                driver.step()
            assert time.monotonic() < until_s
            time.sleep(0.0005)
        for (driver, key), (prompt, _) in asked.items():
            assert driver.drawn[key, 0] == FakeNetwork().answer(prompt, 5)
        while any(driver.engine._pool.is_moving for driver in made):
            for driver in made:
                driver.step()
            assert time.monotonic() < until_s
            time.sleep(0.0005)
        for driver in made:
            driver.assert_nothing_is_held()


def test_fetched_blocks_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    """As `tests/shards/test_deterministic.py`: tokens and 20 logprobs of each, of a random network and a real one; the
    prompt computed, fetched, half fetched, and fetched from a shard that has read it from disk.
    """
    for path in (model, weights()):
        whole: dict[str, object] = {"kv_blocks": 60, "deterministic": True, "kv_listen": HERE, "kv_secret": SECRET}
        stored = {**whole, "kv_dir": tmp_path / path.name}
        half, first, later, fourth = (
            Driver(Model.load(path).network, **options) for options in (whole, stored, whole, whole)
        )
        half.ask("half", PROMPT[:300], new=1)
        half.run()
        ask(first)
        first.run()
        answer = drawn_by(first)
        for other, owner in ((later, first), (fourth, half)):
            ask(other, source=KvSource(address_of(owner), len(PROMPT)))
            work(other, owner, until="it", check=False)
            assert other.ended["it", 0].cached_tokens == 256
            assert drawn_by(other) == answer
        first.engine.preserve(20.0)
        first.engine.close()
        restarted, last = Driver(Model.load(path).network, **stored), Driver(Model.load(path).network, **whole)
        ask(restarted)
        restarted.run()
        ask(last, source=KvSource(address_of(restarted), len(PROMPT)))
        work(last, restarted, until="it", check=False)
        assert (restarted.ended["it", 0].cached_tokens, last.ended["it", 0].cached_tokens) == (256, 256)
        assert drawn_by(restarted) == drawn_by(last) == answer
        for driver in (half, later, fourth, restarted, last):
            driver.engine.close()


@asynccontextmanager
async def a_shard(secret: Path) -> AsyncIterator[tuple[HandRouter, wire.Welcome]]:
    """A shard as a process, and a router that is attached to it."""
    command = [*("-P", "-m", "shards", "--model", "bundled", "--device", "cpu", "--threads", "1")]
    command += [*("--listen", "127.0.0.1:0", "--kv-listen", "127.0.0.1:0", "--kv-secret-file", str(secret))]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        line = ""
        while " on 127.0.0.1:" not in line:
            line = (await process.stderr.readline()).decode()
            assert line, "the shard did not start"
        address = line.rpartition(" ")[2].strip()
        async with grpc.aio.insecure_channel(address, options=limits.CLIENT_OPTIONS) as channel:
            router = HandRouter(channel)
            yield router, await router.hello()
    finally:
        process.terminate()
        await process.communicate()


@pytest.mark.timeout(120)
async def test_a_router_has_a_shard_fetch_from_another_one(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("52f1d0c97ab8e634" * 4)
    async with a_shard(secret) as (owner, told), a_shard(secret) as (other, welcome):
        assert told.kv_group == welcome.kv_group != b""
        assert told.kv_address != welcome.kv_address
        # nothing listens there
        await other.ask(1, some_prompt(0)[:200], source=wire.Source(address="127.0.0.1:1", tokens=200))
        assert (await other.until_finished(1)).cached_tokens == 0
        for number in range(2, 8):
            prompt = some_prompt(number)
            await owner.ask(number, prompt)
            assert (await owner.until_finished(number)).cached_tokens == 0
            await other.ask(number, prompt, source=wire.Source(address=told.kv_address, tokens=1300))
            # on a busy machine a shard may find that computing is faster than waiting
            if (cached := (await other.until_finished(number)).cached_tokens) == 1280:
                break
        assert cached == 1280
        loads = [report.load.peers for report in other.reports if report.load.HasField("peers")]
        assert loads[-1].blocks >= 20
        assert loads[-1].received_bytes > 0


def some_prompt(seed: int) -> list[int]:
    return [3 + token % 50 for token in some_tokens(1300, seed)]

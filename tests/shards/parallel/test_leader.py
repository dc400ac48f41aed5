"""What the first process has its network do, the networks of all others do."""

from __future__ import annotations

import random
import socket

import pytest

from shards.exec.batch import Batch
from shards.exec.fake import FakeNetwork
from shards.exec.fake_device import FakeDevice
from shards.exec.network import DeviceLost, DrawingNetwork, FallibleNetwork, HostedNetwork
from shards.nouns import FinishReason
from shards.parallel.followers import Followers
from shards.parallel.leader import LeadingDevice, LeadingNetwork
from shards.parallel.link import LinkBroken, PartLink
from shards.parallel.orders import Orders
from tests.shards.drafting import LARGE_S, DraftingDriver, TimedDevice, TimedNetwork
from tests.shards.driver import Clock, Driver, some_tokens
from tests.shards.parallel.on_threads import FollowersOnThreads


def never(_: object) -> None:
    """No process ends by itself."""


def test_an_engine_sees_the_abilities_of_its_own_part():
    plain = LeadingNetwork(FakeNetwork(), FollowersOnThreads().followers, never)
    device = LeadingDevice(FakeDevice(), FollowersOnThreads().followers, never)
    assert not isinstance(plain, DrawingNetwork)
    assert isinstance(device, DrawingNetwork)
    for network in (plain, device):
        assert isinstance(network, HostedNetwork)
        assert isinstance(network, FallibleNetwork)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [FakeNetwork, FakeDevice])
def test_after_a_random_life_all_parts_hold_the_same_kv(kind, seed):
    """Fakes fail if they read KV that was never written, so a copy or a step that came too late shows itself."""
    rng = random.Random(seed)
    own, other, third, alone = (kind() for _ in range(4))
    others = FollowersOnThreads(other, third)
    lead = LeadingDevice if kind is FakeDevice else LeadingNetwork
    options = {
        "kv_blocks": rng.choice([10, 16, 30]),
        "host_bytes": rng.choice([0, 20, 60]) * own.block_bytes,
        "max_running": rng.choice([2, 6]),
        "deterministic": seed == 5,
        "ageing_s": 3.0,
        "preempt_cooldown_s": 0.0,
        "max_waiting": 1000,
    }
    drivers = Driver(lead(own, others.followers, never), **options), Driver(alone, **options)
    for key in range(25):
        prompt = some_tokens(128, rng.randint(0, 2))[: rng.choice([0, 64, 128])] + some_tokens(rng.randint(1, 90), key)
        new, rank = rng.randint(1, 30), rng.randint(0, 3)
        sampling = rng.choice([{}, {"temperature": 1.0, "seed": key}, {"repetition_penalty": 1.2}])
        steps, ends = rng.randint(0, 6), rng.random() < 0.1
        for driver in drivers:
            driver.ask(key, prompt, new=new, rank=rank, **sampling)
            for _ in range(steps):
                driver.step()
            if ends:
                driver.engine.cancel(key)
            driver.clock.now_s += 0.5
    for driver in drivers:
        driver.run()
    others.end()
    assert not others.errors
    assert drivers[0].drawn == drivers[1].drawn
    assert drivers[0].ended.keys() == set(drivers[1].ended)
    for device in (own, other, third):
        if isinstance(device, FakeDevice):
            device.finish()
    assert own.calls == other.calls == third.calls > 100
    assert (own._memory == other._memory).all()
    assert (own._memory == third._memory).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [TimedNetwork, TimedDevice])
def test_a_draft_model_that_the_first_process_has_alone_leaves_all_parts_with_the_same_kv(kind, seed):
    rng, clock = random.Random(seed), Clock()
    own, other, alone = kind(clock, LARGE_S), kind(Clock(), LARGE_S), kind(Clock(), LARGE_S)
    others = FollowersOnThreads(other)
    lead = LeadingDevice if kind is TimedDevice else LeadingNetwork
    options = {"kv_blocks": 20, "host_bytes": 20 * own.block_bytes, "max_running": 3, "max_waiting": 1000}
    drafted = DraftingDriver(7, kind=kind, large=lead(own, others.followers, never), clock=clock, **options)
    drivers = drafted, Driver(alone, **options)
    for key in range(20):
        prompt, new, rank = some_tokens(rng.randint(1, 150), key), rng.randint(1, 60), rng.randint(0, 2)
        sampling = rng.choice([{}, {"temperature": 1.0, "seed": key}, {"repetition_penalty": 1.2}])
        steps, drains = rng.randint(0, 20), rng.random() < 0.1
        for driver in drivers:
            driver.ask(key, prompt, new=new, rank=rank, **sampling)
            for _ in range(steps):
                driver.step()
        if drains:
            for driver in drivers:
                driver.run()
    for driver in drivers:
        driver.run()
    others.end()
    assert not others.errors
    assert drafted.drawn == drivers[1].drawn
    assert drafted.guessed[1] > 50
    for device in (own, other):
        if isinstance(device, TimedDevice):
            device.finish()
    assert own.calls == other.calls
    assert (own._memory == other._memory).all()


class Failing(FakeNetwork):
    """Fails in the step that computes token 251."""

    def forward(self, batch: Batch):
        if 251 in batch.token_ids:
            raise RuntimeError("connection closed by peer")
        return super().forward(batch)


def test_a_call_that_fails_ends_the_engine_since_the_others_wait_for_it():
    others = FollowersOnThreads(FakeNetwork())
    driver = Driver(LeadingNetwork(Failing(), others.followers, never))
    driver.ask("good", some_tokens(10), new=3)
    driver.run()
    assert driver.ended["good", 0].reason is FinishReason.LENGTH
    driver.ask("bad", [*some_tokens(10), 251], new=3)
    with pytest.raises(DeviceLost, match="connection closed by peer"):
        driver.run()
    others.end()


def test_a_process_that_ended_while_the_shard_was_idle_ends_it_too():
    lost: list = []
    others = FollowersOnThreads(FakeNetwork())
    driver = Driver(LeadingNetwork(FakeNetwork(), others.followers, lost.append))
    woken: list[str] = []
    driver.engine.wake = lambda: woken.append("now")
    driver.run()
    assert not driver.engine.has_work
    (tell,) = lost
    tell("part 1 ended with status -9")
    assert woken == ["now"]
    assert driver.engine.has_work
    with pytest.raises(DeviceLost, match="part 1 ended with status -9"):
        driver.step()
    others.end()


class Small(FakeNetwork):
    """Has no memory."""

    def allocate(self, blocks: int) -> None:
        raise ValueError(f"{blocks} blocks do not fit into the memory of part 1")

    def host_memory(self, slots: int):
        raise MemoryError


def test_memory_that_another_process_lacks_is_refused_with_its_words():
    others = FollowersOnThreads(Small())
    network = LeadingNetwork(FakeNetwork(), others.followers, never)
    with pytest.raises(ValueError, match="64 blocks do not fit into the memory of part 1"):
        network.allocate(64)
    with pytest.raises(ValueError, match="there is not enough memory"):
        network.host_memory(64)
    others.end()


def test_a_process_that_has_ended_breaks_its_link():
    others = FollowersOnThreads(Failing())
    network = LeadingNetwork(FakeNetwork(), others.followers, never)
    network.allocate(4)
    driver = Driver(network)
    driver.ask("bad", [251], new=1)
    driver.run()
    others._threads[0].join(10.0)
    assert [str(error) for error in others.errors] == ["connection closed by peer"]
    with pytest.raises(LinkBroken, match="another process of this shard has ended"):
        network.allocate(4)
    driver.ask("late", [1], new=1)
    with pytest.raises(DeviceLost, match="has ended"):
        driver.run()
    others.end()


def test_a_link_has_bounds():
    own, other = socket.socketpair()
    link = PartLink(own, waits_s=0.01)
    with pytest.raises(LinkBroken, match="does not read"):
        # the other end never reads
        link.send(bytes(1 << 26))
    other.close()
    with pytest.raises(ValueError, match="at most"):
        link.send(bytes((1 << 28) + 1))
    link.close()


def test_a_step_that_only_decodes_is_a_kilobyte_whatever_its_contexts():
    sizes: list[int] = []

    class Counting(Followers):
        def send(self, order: Orders) -> None:
            sizes.append(len(self._encode(order)))

    driver = Driver(
        LeadingNetwork(FakeNetwork(context_tokens=8192), Counting([]), never),
        kv_blocks=4000,
        batch_tokens=200_000,
        chunk_tokens=8192,
        step_s=100.0,
        lanes=64,
    )
    for key in range(64):
        driver.ask(key, some_tokens(1000 + key, key), new=20)
    while len(driver.drawn) < 64 or min(map(len, driver.drawn.values())) < 15:
        driver.step(check=False)
    assert max(sizes) > 4 * 64_000
    assert max(sizes[-10:]) < 1500

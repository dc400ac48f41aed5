"""The engine on a GPU, from submission to the last token, and other engines on this machine with the same work."""

from __future__ import annotations

import inspect
import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.clients import Clients, Job, a_job
from benchmarks.gpu_parts.drive import a_network, answers, some_prompts, some_weights
from benchmarks.gpu_parts.machine import Machine, free_host_bytes, synchronize
from benchmarks.gpu_parts.models import Mix, Sizes, kv_bytes_per_token, linear_parameters, prefill_flops
from benchmarks.gpu_parts.report import Report
from shards.engine import Engine, EngineOptions
from shards.gpu.network import GpuNetwork
from shards.gpu.weights import GpuWeights
from shards.kv.table import blocks_for
from shards.model import Model
from shards.network.config import NetworkConfig

HOST_SHARE = 0.5
SPARE_BLOCKS = 8


def floor_s(machine: Machine, config: NetworkConfig, weights: GpuWeights, jobs: list[Job]) -> float:
    """Seconds that the hardware needs if prefill and decode never overlap and all jobs run side by side."""
    prompts = sum(prefill_flops(config, len(job.prompt)) for job in jobs) / machine.matmul_tflops / 1e12
    itemsize, decoding = machine.dtype.itemsize, 0.0
    per_token = 2 * (linear_parameters(config) + config.vocab_size * config.hidden_size)
    for number in range(1, max(job.new_tokens for job in jobs)):
        contexts = [len(job.prompt) + number for job in jobs if job.new_tokens > number]
        linear_s = max(
            weights.bytes_per_step / machine.copy_gb_s / 1e9, len(contexts) * per_token / machine.matmul_tflops / 1e12
        )
        decoding += linear_s + sum(contexts) * kv_bytes_per_token(config, itemsize) / machine.copy_gb_s / 1e9
    return prompts + decoding


def run_engine(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Whole workloads: tokens per second beside the floor."""
    weights = some_weights(machine, config)
    clients = an_engine(machine, sizes, name, config, weights, EngineOptions(kv_blocks=16, max_waiting=2048))
    rng = np.random.default_rng(1)
    for label, mix in sizes.mixes.items():
        jobs = jobs_of(config, mix, rng)
        floor = floor_s(machine, config, weights, jobs)
        measure = partial(closed, report, clients, f"{name}, {label}", jobs, mix.concurrency, floor)
        report.attempt(f"engine, {name}, {label}", measure, needs_s=5 + 3 * floor)
    clients.engine.close()


def run_long(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Chats beside a long prompt, and a huge prompt that is computed, found on the device and found in host memory."""
    weights = some_weights(machine, config)
    block_bytes = GpuNetwork.of(config, weights).block_bytes
    # page-locked memory is taken from all other programs, so half of the free memory is left to them
    hosted = int(free_host_bytes() * HOST_SHARE) // block_bytes - SPARE_BLOCKS
    sizes = replace(sizes, huge_tokens=max(0, min(sizes.huge_tokens, 64 * hosted)))
    is_huge = 0 < sizes.huge_tokens <= config.max_positions - 2 * 128
    host_bytes = (blocks_for(sizes.huge_tokens) + SPARE_BLOCKS) * block_bytes if is_huge else 0
    options = EngineOptions(kv_blocks=16, max_waiting=2048, host_bytes=host_bytes)
    clients = an_engine(machine, sizes, name, config, weights, options)
    rng = np.random.default_rng(3)
    if sizes.long_tokens + sizes.answer_tokens <= config.max_positions:
        long = 3 * prefill_flops(config, sizes.long_tokens) / machine.matmul_tflops / 1e12
        report.attempt(
            f"chats beside a long prompt, {name}",
            lambda: chats_beside(report, machine, sizes, clients, name, config, rng),
            needs_s=15 + 2 * long,
        )
    if is_huge:
        huge = prefill_flops(config, sizes.huge_tokens) / machine.matmul_tflops / 1e12
        report.attempt(
            f"{sizes.huge_tokens} tokens, {name}",
            lambda: cold_warm_and_restored(report, machine, sizes, clients, name, config, rng),
            needs_s=15 + 3 * huge,
        )
    clients.engine.close()


def an_engine(
    machine: Machine,
    sizes: Sizes,
    name: str,
    config: NetworkConfig,
    weights: GpuWeights,
    options: EngineOptions,
) -> Clients:
    """An engine with `options` and all memory that the device has room for, warm."""
    network = GpuNetwork.of(config, weights)
    most = max(mix.concurrency for mix in sizes.mixes.values())
    options = replace(options, max_running=most + 1)
    if machine.is_gpu:
        room = network.room_bytes(batch_tokens=options.batch_tokens, rows=most)
        options = replace(options, kv_blocks=int(room * sizes.kv_share) // network.block_bytes)
    clients = Clients(Engine(Model(name, network), options))
    if machine.is_gpu:
        network.prepare(most)
    warm_up(clients, machine, config)
    return clients


def compare_running_ahead(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """The first mix with steps that run ahead, and with steps that are waited for."""
    weights = some_weights(machine, config)
    label, mix = next(iter(sizes.mixes.items()))
    rng = np.random.default_rng(2)
    jobs = jobs_of(config, mix, rng)
    floor = floor_s(machine, config, weights, jobs)
    blocks = 2 * sum(blocks_for(len(job.prompt) + job.new_tokens) for job in jobs)
    for run_ahead in ("off", "on"):
        network = GpuNetwork.of(config, weights)
        options = EngineOptions(kv_blocks=blocks, max_running=mix.concurrency, run_ahead=run_ahead)
        clients = Clients(Engine(Model(name, network), options))
        if machine.is_gpu:
            network.prepare(mix.concurrency)
            # compiles the kernels of prefill, and trains the cost model
            clients.run(jobs_of(config, mix, rng), mix.concurrency)
        again = [Job(job.prompt, job.new_tokens) for job in jobs]
        closed(report, clients, f"run_ahead {run_ahead}, {name}, {label}", again, mix.concurrency, floor)


def warm_up(clients: Clients, machine: Machine, config: NetworkConfig) -> None:
    """Compile kernels and train the cost model before anything is timed."""
    rng = np.random.default_rng(0)
    lengths = (64, 513, 2000, 8192, 100) if machine.is_gpu else (3,)
    for length in lengths:
        clients.run([a_job(config, length, 2, rng)], 1)
    clients.engine.clear_cache()
    clients.engine.step()


def jobs_of(config: NetworkConfig, mix: Mix, rng: np.random.Generator) -> list[Job]:
    return [
        a_job(
            config,
            int(rng.integers(mix.prompt_tokens[0], mix.prompt_tokens[1] + 1)),
            int(rng.integers(mix.output_tokens[0], mix.output_tokens[1] + 1)),
            rng,
        )
        for _ in range(mix.requests)
    ]


def closed(report: Report, clients: Clients, label: str, jobs: list[Job], concurrency: int, floor: float) -> None:
    spent = clients.run(jobs, concurrency)
    tokens = sum(job.new_tokens for job in jobs)
    report.add("e2e", f"engine, {label}", tokens / spent, floor=tokens / floor, unit="tok/s", note=latencies(jobs))


def latencies(jobs: list[Job]) -> str:
    first = np.percentile([job.first_s for job in jobs], (50, 99)) * 1e3
    gaps = [gap for job in jobs for gap in job.gaps_s]
    between = np.percentile(gaps or [0.0], (50, 99)) * 1e3
    return f"first token P50 {first[0]:.0f} P99 {first[1]:.0f} ms, between P50 {between[0]:.1f} P99 {between[1]:.1f} ms"


def chats_beside(
    report: Report,
    machine: Machine,
    sizes: Sizes,
    clients: Clients,
    name: str,
    config: NetworkConfig,
    rng: np.random.Generator,
) -> None:
    """The wait of continuous chats between tokens while one long prompt is computed."""
    long = a_job(config, sizes.long_tokens, sizes.answer_tokens, rng)
    prompt_tokens, new_tokens = sizes.chat_tokens
    chats = [a_job(config, prompt_tokens, new_tokens, rng) for _ in range(sizes.chats)]
    for chat in chats:
        clients.submit(chat)
    while any(not chat.drawn_s for chat in chats):
        clients.step()
    clients.submit(long)
    talking = list(chats)
    while not long.drawn_s:
        clients.step()
        for place, chat in enumerate(talking):
            if len(chat.drawn_s) == chat.new_tokens:
                talking[place] = a_job(config, prompt_tokens, new_tokens, rng)
                chats.append(talking[place])
                clients.submit(talking[place])
    begin, end = long.submitted_s, long.drawn_s[0]
    gaps = [
        after - before
        for chat in chats
        for before, after in zip(chat.drawn_s, chat.drawn_s[1:], strict=False)
        if begin <= before and after <= end
    ]
    clients.run([], 1)
    worst = float(np.percentile(gaps or [0.0], 99)) * 1e3
    report.add("long", f"{name}, {sizes.chats} chats beside {sizes.long_tokens}: P99 between tokens", worst, unit="ms")
    alone = prefill_flops(config, sizes.long_tokens) / machine.matmul_tflops / 1e12
    report.add(
        "long", f"{name}, the long prompt: first token", long.first_s, floor=alone, unit="s", note="floor: alone"
    )


def cold_warm_and_restored(
    report: Report,
    machine: Machine,
    sizes: Sizes,
    clients: Clients,
    name: str,
    config: NetworkConfig,
    rng: np.random.Generator,
) -> None:
    """One huge prompt three times: computed, found on the device, and found in host memory."""
    clients.engine.clear_cache()
    cold = a_job(config, sizes.huge_tokens, sizes.answer_tokens, rng)
    clients.run([cold], 1)
    floor = prefill_flops(config, sizes.huge_tokens) / machine.matmul_tflops / 1e12
    report.add("long", f"{name}, {sizes.huge_tokens} tokens cold: first token", cold.first_s, floor=floor, unit="s")
    for label in ("warm", "restored from host"):
        if label != "warm":
            report.add("long", f"{name}, {sizes.huge_tokens} tokens to the host", evict_all(clients.engine), unit="s")
        more = rng.integers(0, config.vocab_size, 128 if machine.is_gpu else 2).astype("<u4")
        again = Job(np.concatenate((cold.prompt, more)), sizes.answer_tokens)
        clients.run([again], 1)
        if again.cached_tokens < sizes.huge_tokens // 64 * 64:
            raise RuntimeError(f"{label}: {again.cached_tokens} of {sizes.huge_tokens} tokens were found in the cache")
        what = f"{name}, {sizes.huge_tokens} tokens + {len(more)} {label}: first token"
        report.add("long", what, again.first_s, unit="s", note="the prompt is handed over and hashed meanwhile")


def evict_all(engine: Engine) -> float:
    """Seconds until all cached blocks have left the device for the host, which a full pool does bit by bit."""
    # not a method of the engine, because only this benchmark needs it
    pool, started = engine._pool, time.perf_counter()
    pool.make_room(pool.size)
    while pool._draining:
        pool.has_landed(())
    return time.perf_counter() - started


def run_steps(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """The same without an engine, with and without running ahead, to show the cost of the engine's own work."""
    weights = some_weights(machine, config)
    for label, mix in sizes.mixes.items():
        if mix.prompt_tokens[0] != mix.prompt_tokens[1]:
            continue
        prompt_tokens, new_tokens = mix.prompt_tokens[0], mix.output_tokens[0]
        blocks = mix.requests * -(-(prompt_tokens + new_tokens) // 64)
        prompts = some_prompts(config, [prompt_tokens] * mix.requests)
        jobs = [Job(np.asarray(prompt, dtype="<u4"), new_tokens) for prompt in prompts]
        floor = floor_s(machine, config, weights, jobs)

        def measure(
            prompts: list[list[int]] = prompts,
            new_tokens: int = new_tokens,
            blocks: int = blocks,
            floor: float = floor,
            label: str = label,
        ) -> None:
            network = a_network(config, weights, blocks=blocks)
            if machine.is_gpu:
                network.steps.warm_up([len(prompts)])
                answers(network, prompts, 2, ahead=0)
            for ahead in (0, 1):
                synchronize(machine.device)
                started = time.perf_counter()
                answers(network, prompts, new_tokens, ahead=ahead)
                rate = len(prompts) * new_tokens / (time.perf_counter() - started)
                of_floor = len(prompts) * new_tokens / floor
                report.add("e2e", f"steps alone, {name}, {label}, {ahead} ahead", rate, floor=of_floor, unit="tok/s")

        report.attempt(f"steps alone, {name}, {label}", measure, needs_s=10 + 4 * floor)


def run_transformers(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """transformers' continuous batching, random weights of the same shape, if it can be imported."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    label, mix = next(iter(sizes.mixes.items()))
    settings = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tied_head,
    )
    with torch.device(machine.device):
        model = transformers.AutoModelForCausalLM.from_config(
            settings, dtype=machine.dtype, attn_implementation="sdpa"
        ).eval()
    tokens = mix.output_tokens[0]
    generation = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted: dict[str, Any] = {"progress_bar": False, "persistent_manager": machine.is_gpu, "warmup": machine.is_gpu}
    known = inspect.signature(model.generate_batch).parameters
    options = {key: value for key, value in wanted.items() if key in known}
    if not machine.is_gpu and hasattr(transformers, "ContinuousBatchingConfig"):
        # without this it would take all free memory
        options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=8)
    # the first run captures graphs and keeps them
    for is_warm in (False, True) if machine.is_gpu else (True,):
        prompts = some_prompts(config, [mix.prompt_tokens[0]] * mix.requests, seed=int(is_warm))
        synchronize(machine.device)
        started = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=generation, **options)
        spent = time.perf_counter() - started
        if len(outputs) != len(prompts):
            raise RuntimeError(f"answered {len(outputs)} of {len(prompts)}")
    rate = len(prompts) * tokens / spent
    report.add("e2e", f"transformers' continuous batching, {name}, {label}", rate, unit="tok/s")

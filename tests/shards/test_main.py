"""The command line and its options."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shards.__main__ import app, kv_bytes, pool_options
from shards.before_loading import doubts_about
from shards.bundled import weights
from shards.engine import Engine, EngineOptions
from shards.exec.fake import FakeNetwork
from shards.kv.table import blocks_for
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from tests.shards.driver import EOS, a_tokenizer, packed
from tests.shards.programs import answers_at, serving
from tests.shards.tiny_checkpoints import save_checkpoint


def test_a_quarter_of_the_pool_may_be_pinned_unless_a_long_prompt_needs_it_or_the_operator_says() -> None:
    model = Model("m", FakeNetwork(), a_tokenizer(), frozenset({EOS}))
    context_blocks = blocks_for(model.network.context_tokens)
    large, small = EngineOptions(kv_blocks=10 * context_blocks), EngineOptions(kv_blocks=context_blocks)
    assert pool_options(model, None, large).pin_share == 0.25
    assert pool_options(model, None, small).pin_share == 0.0
    assert pool_options(model, 0.5, small).pin_share == 0.5
    with pytest.raises(ValueError, match="hold no KV block"):
        pool_options(model, None, EngineOptions(kv_bytes=1))


def test_kv_takes_its_part_of_a_gpu_whether_a_router_started_the_shard_or_not() -> None:
    class OnGpu(FakeNetwork):
        def room_bytes(self, *, batch_tokens: int, rows: int, shards: int) -> int:
            return 2**36 // shards - batch_tokens - rows

    options = EngineOptions(batch_tokens=1000, max_running=64)
    on_gpu, on_cpu = Model("m", OnGpu()), Model("m", FakeNetwork())
    assert kv_bytes(on_gpu, None, options, gpu_shards=2) == 2**35 - 1064
    assert kv_bytes(on_gpu, 3, options, gpu_shards=2) == 3 * 2**30
    assert kv_bytes(on_cpu, None, options, gpu_shards=2) == 2**29


def started(*options: str, status: int = 1) -> Result:
    """The result of a start with `options`; it must fail, because a shard that starts serves until it is stopped."""
    result = CliRunner().invoke(app, ["--threads", "1", "--device", "cpu", "--listen", "127.0.0.1:0", *options])
    assert result.exit_code == status
    assert result.exception is None or isinstance(result.exception, SystemExit), "a person was shown a traceback"
    return result


def test_a_port_that_another_process_has_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = started("--listen", address, "--kv-memory", "0.01")
    assert f"cannot listen on {address}: it must be" in result.stderr


def test_memory_that_is_not_there_is_a_sentence() -> None:
    result = started("--kv-memory", "1000000")
    assert "1e+06 GiB of KV are configured, but this machine has only" in result.stderr


def test_a_model_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    assert f"cannot load {tmp_path}: {tmp_path} has no config.json" in started("--model", str(tmp_path)).stderr


def test_options_that_cannot_be_are_a_sentence() -> None:
    assert "'sideways' is not one of 'auto', 'on', 'off'" in started("--run-ahead", "sideways", status=2).stderr
    assert "'wildly' is not one of 'auto', 'off'" in started("--speculate", "wildly", status=2).stderr
    assert "'some' is not one of 'auto', 'all'" in started("--window-kv", "some", status=2).stderr


def test_a_port_for_kv_that_is_no_address_and_a_secret_that_can_be_guessed_are_sentences(tmp_path: Path) -> None:
    assert "--kv-listen is '7002'; it must be HOST:PORT" in started("--kv-listen", "7002").stderr
    assert "--kv-listen is 'here:port'" in started("--kv-listen", "here:port").stderr
    weak = tmp_path / "secret"
    for secret in ("short\n", "a" * 64, "a sentence that a person could remember well enough"):
        weak.write_text(secret)
        result = started("--kv-listen", "127.0.0.1:0", "--kv-secret-file", str(weak))
        assert "holds a secret that may be guessed" in result.stderr
        assert "openssl rand -hex 32" in result.stderr
    assert "No such file" in started("--kv-secret-file", str(tmp_path / "none")).stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "shard-0.shards", "[::ffff:10.1.2.3]"])
def test_a_port_for_kv_that_others_reach_is_refused_without_secret_and_tls_before_weights_are_read(host: str) -> None:
    result = started("--kv-listen", f"{host}:7002", "--model", "nowhere")
    assert result.exit_code == 1
    assert "KV of all tenants" in result.stderr
    assert "add --kv-secret-file, or --kv-ca" in result.stderr
    assert "nowhere" not in result.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"])
def test_a_port_for_kv_of_this_machine_alone_needs_no_secret_and_gets_a_warning(host: str) -> None:
    result = started("--kv-listen", f"{host}:7002", "--model", "nowhere")
    assert "warning: --kv-listen has no --kv-secret-file" in result.stderr
    assert "nowhere" in result.stderr


def test_kv_over_tls_needs_a_certificate() -> None:
    assert "--kv-ca is for KV over TLS: add --tls-cert" in started("--kv-ca", "ca.pem").stderr


def test_adapters_that_cannot_be_served_are_a_sentence(tmp_path: Path) -> None:
    assert "--lora is 'sql'; it must be NAME=DIR" in started("--lora", "sql").stderr
    assert "--lora names 'a' twice" in started("--lora", "a=x", "--lora", "a=y").stderr
    assert f"{tmp_path}/x is no folder of adapters" in started("--lora-dir", str(tmp_path / "x")).stderr
    assert "adapter_config.json is missing" in started("--lora", f"a={tmp_path}", "--kv-memory", "0.01").stderr


def test_a_port_for_kv_that_another_process_has_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "in use" in started("--kv-listen", address, "--kv-memory", "0.01").stderr


PROMPTS = [list(range(20, 90)), list(range(300, 345))]


def answered_alone(model: Model, new: int) -> list[list[int]]:
    """Greedy answers to PROMPTS by an engine without drafts."""
    engine = Engine(model, EngineOptions(kv_blocks=32))
    drawn: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Submission(number, len(prompt), new, sampling=SamplingParams(ignore_eos=True)))
        engine.extend(number, packed(prompt))
    while engine.has_work:
        for each in engine.step().drawn:
            drawn[each.key] += each.token_ids  # type: ignore[call-overload]
    engine.close()
    return drawn


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--experts", "divided"],
            "--experts divided is for several processes: add --tensor-parallel, or leave it out",
        ),
        (["--experts", "divided", "--tensor-parallel", "2"], "LlamaForCausalLM has no experts (leave out --experts)"),
        (["--experts", "some", "--tensor-parallel", "2"], "'some' is not one of 'whole', 'divided'"),
    ],
)
def test_experts_that_cannot_be_divided_are_a_sentence(options: list[str], sentence: str) -> None:
    assert sentence in started(*options, status=2 if "is not one of" in sentence else 1).stderr


async def test_a_shard_with_a_draft_model_answers_as_without() -> None:
    expected = answered_alone(Model.load(weights()), 40)
    small = ("--draft-model", str(weights()), "--draft-kv-memory", "0.01")
    with serving("bundled", *small) as address:
        assert await answers_at(address, PROMPTS, 40) == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--draft-model", "/nowhere"], "there is no directory /nowhere (models are not downloaded: fetch one with"),
        (["--draft-model", "{tiny}"], "are not the same (one of them has no tokenizer): choose a draft model with the"),
        (["--draft-model", "{own}", "--speculate", "off"], "with --speculate off or --deterministic none are verified"),
        (["--draft-model", "{own}", "--deterministic"], "with --speculate off or --deterministic none are verified"),
        (["--draft-model", "{own}", "--draft-kv-memory", "1000000"], "for the draft model, but this machine has only"),
        (["--draft-kv-memory", "1"], "--draft-kv-memory is for --draft-model: add it, or leave this out"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_a_sentence(options: list[str], sentence: str, tmp_path: Path) -> None:
    places = {"tiny": str(tmp_path), "own": str(weights())}
    if "{tiny}" in options:
        save_checkpoint(tmp_path, "qwen3")
    result = started("--kv-memory", "0.01", *(option.format(**places) for option in options))
    (last,) = [line for line in result.stderr.splitlines() if not line.startswith("loading")]
    assert sentence in last


def _said(*options: str) -> str:
    """What a start with `options` says; it must end before weights are read."""
    said = started(*options).stderr
    assert "loading weights" not in said
    return said


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no config.json (a checkpoint has config.json and *.safetensors)"),
        ({"adapter_config.json": "{}"}, "is a LoRA adapter and no model (serve its base model, with --lora model="),
        ({"model-1/config.json": "{}"}, "has no config.json (did you mean"),
        ({"config.json": '{"architectures": ["GPT2LMHeadModel"]}'}, "architecture GPT2LMHeadModel is not supported"),
        ({"config.json": "{"}, "config.json: Input data was truncated"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_said_with_what_to_do(
    tmp_path: Path, files: dict[str, str], sentence: str
) -> None:
    folder = tmp_path / "model"
    for name, text in {"empty": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert sentence in _said("--model", str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_is_no_checkpoint_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"1")
    assert f"{name} is a file (name the directory with" in _said("--model", str(tmp_path / name))


def test_a_tokenizer_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in _said("--model", str(tmp_path))


def test_a_draft_model_with_other_tokens_is_said_before_weights_are_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    a_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert "choose a draft model with the same tokenizer" in _said("--draft-model", str(tmp_path))


@pytest.mark.parametrize(
    ("files", "doubt"),
    [
        ({}, "has no tokenizer.json, so clients have to send token ids"),
        ({"tokenizer.model": b""}, "of tokenizer.model"),
        ({"tokenizer.json": b"{}"}, "has no chat template, so /v1/chat/completions and its like are refused"),
        ({"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}, None),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}'}, None),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[1]"}, "has no chat template"),
    ],
)
def test_what_a_checkpoint_lacks_for_some_requests_is_a_warning(
    tmp_path: Path, files: dict[str, bytes], doubt: str | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    doubts = list(doubts_about(tmp_path))
    assert len(doubts) == (doubt is not None)
    assert doubt is None or doubt in doubts[0]

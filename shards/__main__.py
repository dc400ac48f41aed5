"""One shard as a process: `python -m shards`, or `pointsman shard`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

import typer

from shards.before_loading import TokenSet, doubts_about, require_same_tokens
from shards.bundled import NAME, weights
from shards.gguf.packaged import PACKAGES, file_of
from shards.kv.peer_identity import PeerTls, require_protected, secret_in
from shards.lifeline import end_with_stdin
from shards.logs import log_to_stderr, tell
from shards.shortage import memory_for, refuse_beyond, usable_bytes
from shards.threads import default_threads, use_threads
from tls.certificates import Certificates
from tls.errors import TlsError
from tls.settings import GRPC_ALPN, HTTP_ALPN, TlsSettings, read_pin

if TYPE_CHECKING:
    from shards.draft_model import DraftModel
    from shards.engine import EngineOptions
    from shards.kv.options import PoolOptions
    from shards.model import Model
    from shards.tracing import ShardTraces
    from shards.weight_files import WeightFiles

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
RunAhead = Literal["auto", "on", "off"]
Speculate = Literal["auto", "off"]
Blend = Literal["auto", "off"]
Experts = Literal["whole", "divided"]
WindowKv = Literal["auto", "all"]
TlsVersion = Literal["1.2", "1.3"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def announce(supervised: bool, event: dict[str, object], sentence: str) -> None:
    """Report to a supervisor as JSON on stdout, or to a person on stderr."""
    if supervised:
        print(json.dumps(event), flush=True)  # noqa: T201
    else:
        tell(sentence)


@contextmanager
def exit_on_error(*, before: str = "") -> Iterator[None]:
    """Exit with status 1 and a message for every failure that is not a bug."""
    from shards.exec.network import DeviceLost
    from shards.loop import EngineError
    from shards.parallel.link import LinkBroken
    from shards.warmup import BrokenModel
    from shards.wire.otel import CannotExport

    try:
        yield
    except (ValueError, OSError, BrokenModel, CannotExport, DeviceLost, EngineError, LinkBroken) as error:
        tell(f"{before}{error}", logging.ERROR)
        raise typer.Exit(1) from error


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of HOST:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 0xFFFF:
        raise ValueError(f"--kv-listen is '{address}'; it must be HOST:PORT, such as 0.0.0.0:7002")
    return host.strip("[]"), int(port)


class KvPort(NamedTuple):
    """Where and with whom a shard exchanges KV."""

    address: tuple[str, int] | None
    secret: bytes
    tls: PeerTls | None

    @classmethod
    def of(
        cls, shard: str, listen: str | None, secret_file: str | None, authority: str | None, own: TlsSettings
    ) -> Self:
        """Of the options of a shard, with `own` certificates. Raises OSError, ValueError; prints what is doubtful."""
        secret = b"" if secret_file is None else secret_in(Path(secret_file))
        tls = None
        if authority is not None:
            if own.cert is None:
                raise ValueError("--kv-ca is for KV over TLS: add --tls-cert and --tls-key, or leave it out")
            settings = TlsSettings(own.cert, own.key, authority, min_version=own.min_version)
            try:
                tls = PeerTls.of(shard, settings)
            except TlsError as error:
                raise ValueError(str(error)) from error
        if listen is None:
            return cls(None, secret, tls)
        host, port = host_and_port(listen)
        doubt = require_protected(host, is_protected=bool(secret) or tls is not None)
        if doubt:
            tell(f"warning: {doubt}", logging.WARNING)
        return cls((host, port), secret, tls)


def load_model(
    source: str,
    name: str | None,
    dtype: str,
    kv_dtype: str,
    device: str,
    *,
    supervised: bool,
    at_end: Callable[[Callable[[], None]], object],
    size: int = 1,
    experts: str = "whole",
    threads: int = 1,
    what: str = "weights",
    on_files: Callable[[WeightFiles], None] = lambda _: None,
) -> Model:
    """Load the model at `source` (a directory or `bundled`) and report progress; exit with 1 if that fails.

    Progress is that of `what`, and `on_files` gets the files before they are read. `at_end` takes what ends the other
    processes of `size`; each has `experts` whole or a slice of each, and computes with `threads` threads.
    """
    announce(supervised, {"loading": "torch", "share": 0.0}, "loading torch ...")
    from shards.model import Model

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        share = done_bytes / max(1, total_bytes)
        announce(supervised, {"loading": what, "share": share}, f"loading {what} ... {share:4.0%}")

    short = memory_for("its weights", hint="choose a smaller model, or another dtype or device")
    with exit_on_error(before=f"cannot load {source}: "), short:
        path, usual_name = checkpoint_of(source)
        load = partial(Model.load, path, name=name or usual_name, dtype=dtype, kv_dtype=kv_dtype)
        if size == 1:
            return load(device=device, on_progress=on_progress, on_files=on_files)
        from shards.gpu.device import choose_device
        from shards.network.config_file import read_config
        from shards.parallel.part import Part
        from shards.parallel.processes import PartProcesses, leading

        whole = experts == "whole"
        Part(0, size, whole).require(read_config(path))
        on = choose_device(device).type
        others = PartProcesses(
            str(path), size=size, dtype=dtype, kv_dtype=kv_dtype, device=on, threads=threads, whole_experts=whole
        )
        at_end(others.close)
        part = load(device=on, on_progress=on_progress, group=others.group, whole_experts=whole)
        others.await_loaded(part.files)
        return leading(part, others)


def checkpoint_of(source: str) -> tuple[Path, str | None]:
    """The folder of the checkpoint at `source`, a directory, a file in GGUF or `bundled`, and its usual name if that is
    another one. Raises CheckpointError for such a file."""
    if source == "bundled":
        return weights(), NAME
    path, name = Path(source), None
    if not path.exists() and source in PACKAGES:
        path, name = file_of(source), source
    if path.suffix == ".gguf" and path.is_file():
        from shards.gguf.folder import folder_of

        return folder_of(path), name or path.stem
    return path, None


def check_before_loading(model: str, draft_model: str | None) -> None:
    """Print what is doubtful about the checkpoint of `model`. Raises ValueError if it is none, or if `draft_model` has
    other tokens."""
    folder, _ = checkpoint_of(model)
    own = TokenSet.of(folder)
    for doubt in doubts_about(folder):
        tell(f"warning: {doubt}", logging.WARNING)
    if draft_model is not None:
        require_same_tokens(TokenSet.of(checkpoint_of(draft_model)[0]), own)


def digesting(kv_dir: Path | None, *, is_needed: bool) -> Callable[[WeightFiles], None]:
    """What begins to read the files of weights for their digest, beside those that load them, if `is_needed`."""

    def begin(files: WeightFiles) -> None:
        from shards.exec.hosting import digests_in

        files.begin(None if kv_dir is None else digests_in(kv_dir))

    return begin if is_needed else lambda _: None


def refuse_alone(draft_model: str | None, draft_kv_memory: float | None, *, verifies: bool) -> None:
    """Raise ValueError for memory of no draft model, and for a draft model of which no token is verified."""
    if draft_model is not None and not verifies:
        raise ValueError("--draft-model guesses tokens, and with --speculate off or --deterministic none are verified")
    if draft_model is None and draft_kv_memory is not None:
        raise ValueError("--draft-kv-memory is for --draft-model: add it, or leave this out")


def refuse_apart(
    size: int, kv_dir: str | None, kv_listen: str | None, *, has_adapters: bool, experts: str | None
) -> None:
    """Raise ValueError for options that need a whole network, or all KV of a block, in one process, if there are
    several, and for `experts` to be divided if there is one.
    """
    if size == 1 and experts is not None:
        raise ValueError(f"--experts {experts} is for several processes: add --tensor-parallel, or leave it out")
    if size > 1 and has_adapters:
        raise ValueError(f"LoRA adapters are not divided: leave out --lora and --lora-dir, or --tensor-parallel {size}")
    given = {"--kv-dir": kv_dir, "--kv-listen": kv_listen}
    refused = next((name for name, value in given.items() if value is not None), None)
    if size > 1 and refused is not None:
        raise ValueError(
            f"{refused} needs the whole KV of a block in one process, and --tensor-parallel {size} divides it: "
            "leave one of them out"
        )


def kv_bytes(model: Model, asked_gib: float | None, options: EngineOptions, *, gpu_shards: int) -> int:
    """Memory of the KV pool: `asked_gib`, or else 0.5 GiB; on a GPU its part of the free memory.

    Raises ValueError if a GPU has none left.
    """
    from shards.exec.network import AdaptableNetwork, DrawingNetwork

    room = getattr(model.network, "room_bytes", None)
    if asked_gib is not None or room is None:
        return int((0.5 if asked_gib is None else asked_gib) * 2**30)
    if options.adapters.is_used and isinstance(model.network, AdaptableNetwork):
        # their memory is taken first: what is left is for KV
        model.network.adapt(options.adapters)
    rows = options.max_running
    if isinstance(model.network, DrawingNetwork):
        rows = options.drawn_rows(model.network.most_rows)
    return int(room(batch_tokens=options.batch_tokens, rows=rows, shards=gpu_shards))


def draft_kv_bytes(model: Model, asked_gib: float | None) -> int:
    """Memory of the KV of the draft model `model`: `asked_gib`, or else 0.25 GiB, and 2 GiB on a GPU."""
    usual_gib = 2.0 if has_own_memory(model) else 0.25
    return int((usual_gib if asked_gib is None else asked_gib) * 2**30)


def drafting_by(draft: Model | None, asked_gib: float | None, *, max_running: int) -> DraftModel | None:
    """The model `draft`, ready to guess; None without one. Raises ValueError if it cannot."""
    if draft is None:
        return None
    from shards.draft_model import DraftModel

    size = draft_kv_bytes(draft, asked_gib)
    if not has_own_memory(draft):
        refuse_beyond(usable_bytes(), size, what=" for the draft model", hint="give --draft-kv-memory less")
    drafting = DraftModel(draft, size)
    drafting.prepare(max_running)
    return drafting


def has_own_memory(model: Model) -> bool:
    """Whether its KV is in the memory of a GPU."""
    return getattr(model.network, "room_bytes", None) is not None


def host_kv_bytes(model: Model, options: EngineOptions) -> int:
    """Total host memory for KV in this process; on a CPU it includes the pool."""
    from shards.exec.hosting import host_slots

    hosted = host_slots(options, model.network.block_bytes) * model.network.block_bytes
    return hosted + (0 if has_own_memory(model) else options.kv_bytes)


def pool_options(model: Model, asked_share: float | None, options: EngineOptions) -> PoolOptions:
    """The pool's options: `asked_share` for pins, or a default that suits the pool. Raises ValueError if empty."""
    from shards.exec.layout import kv_layout
    from shards.kv.options import PoolOptions, usual_pin_share
    from shards.kv.table import blocks_for

    blocks, context_blocks = kv_layout(model.network, options).blocks, blocks_for(model.network.context_tokens)
    usual = usual_pin_share(blocks, context_blocks=context_blocks)
    return PoolOptions(pin_share=usual if asked_share is None else asked_share)


def traces_of(name: str) -> ShardTraces | None:
    """The span exporter, if OpenTelemetry's standard variables ask for one. Raises CannotExport if that fails."""
    from shards.wire.otel import tracer_provider

    provider = tracer_provider("pointsman-shard", name)
    if provider is None:
        return None
    from shards.tracing import ShardTraces

    return ShardTraces(provider)


def certificates_of(shard: str, own: TlsSettings) -> Certificates | None:
    """The certificates of the shard's port; None for plain text. Raises ValueError for settings that cannot be used."""
    if own == TlsSettings():
        return None
    settings = replace(own, pins=frozenset(map(read_pin, own.pins)))
    return _certificates(settings, is_server=True, what=f"shard {shard}")


def router_certificates(own: TlsSettings, authority: str | None) -> Certificates | None:
    """The certificates for https:// URLs of routers; None if nothing but the system's authorities is needed.

    Raises ValueError for files that cannot be used.
    """
    if authority is None and own.cert is None:
        return None
    settings = TlsSettings(own.cert, own.key, authority, min_version=own.min_version)
    return _certificates(settings, is_server=False, what="announcements")


def _certificates(settings: TlsSettings, *, is_server: bool, what: str) -> Certificates:
    try:
        return Certificates(settings, is_server=is_server, what=what, alpn=GRPC_ALPN if is_server else HTTP_ALPN)
    except TlsError as error:
        raise ValueError(str(error)) from error


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def shard(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="A directory in Hugging Face format, a file in GGUF, `smollm2`, or `bundled`.")
    ] = "bundled",
    listen: Annotated[
        str, typer.Option(help="host:port to serve gRPC on; port 0 picks a free one.")
    ] = "127.0.0.1:7001",
    name: Annotated[str, typer.Option(help="Name that this shard reports to routers.")] = "shard",
    served_name: Annotated[str | None, typer.Option(help="Model name for clients; default: the directory's.")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the weights; int8 is the fastest on CPUs, and float16 is slow there.")
    ] = "auto",
    kv_dtype: Annotated[
        KvDtype, typer.Option(help="Type of the KV; int8 and fp8 (e4m3) need half the memory of bfloat16.")
    ] = "auto",
    device: Annotated[
        Device, typer.Option(help="auto is a GPU if there is one; CUDA_VISIBLE_DEVICES chooses among several.")
    ] = "auto",
    tensor_parallel: Annotated[
        int,
        typer.Option(
            metavar="N", help="Processes that compute each step together, with a GPU each, or on CPUs.", min=1
        ),
    ] = 1,
    experts: Annotated[
        Experts | None,
        typer.Option(
            help="With --tensor-parallel, each process has some experts whole, or a part of each; default: whole."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each process; default: from the usable cores.", min=1)
    ] = None,
    kv_memory: Annotated[
        float | None,
        typer.Option(help="Memory for the KV pool, in GiB; default: 0.5, or the free memory of a GPU.", min=0.001),
    ] = None,
    gpu_shards: Annotated[
        int, typer.Option(help="Shards that share this GPU; each takes its part of the memory.", min=1)
    ] = 1,
    host_memory: Annotated[float, typer.Option(help="Host memory, in GiB, for evicted and preempted KV.", min=0)] = 0,
    kv_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory for evicted KV, which later shards read again; default: none."),
    ] = None,
    kv_dir_gib: Annotated[
        float, typer.Option(help="Most disk space that this shard takes in --kv-dir, in GiB.", min=0.001)
    ] = 16,
    kv_listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Exchange KV with other shards, which fetch it at this port."),
    ] = None,
    kv_secret_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A random secret that all shards that exchange KV have in this file."),
    ] = None,
    kv_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="CAs of the shards' certificates: KV is exchanged over TLS, with --tls-cert."
        ),
    ] = None,
    pin_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the KV pool that pinned prefixes may keep; default: 0.25, or less if prompts need the room.",
            min=0,
            max=0.99,
        ),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Sequences that run at the same time.", min=1)] = 64,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait in this shard.", min=1)] = 512,
    step_ms: Annotated[float, typer.Option(help="Target duration of a step; sizes prefill chunks.", min=1)] = 50,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bit-identical answers for any batch and any cache; slow.")
    ] = False,
    run_ahead: Annotated[
        RunAhead, typer.Option(help="Submit each step before the previous one is collected; auto is on on a GPU.")
    ] = "auto",
    speculate: Annotated[
        Speculate, typer.Option(help="Speculative decoding by prompt lookup; auto is on where it pays.")
    ] = "auto",
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A small model with the same tokenizer that guesses tokens, for the model to verify; default: none.",
        ),
    ] = None,
    draft_kv_memory: Annotated[
        float | None,
        typer.Option(help="Memory for the KV of --draft-model, in GiB; default: 0.25, or 2 on a GPU.", min=0.001),
    ] = None,
    blend: Annotated[
        Blend, typer.Option(help="Reuse of documents at any position, for requests that permit it; off forbids it.")
    ] = "auto",
    window_kv: Annotated[
        WindowKv,
        typer.Option(help="KV that layers with a window keep: what is visible, if no KV leaves the device; or all."),
    ] = "auto",
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A LoRA adapter, as PEFT saves it, under this name; may be repeated."),
    ] = None,
    lora_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Serve each LoRA adapter in a folder of this one, also later ones."),
    ] = None,
    max_loras: Annotated[int, typer.Option(help="LoRA adapters in memory at a time.", min=1)] = 8,
    lora_memory: Annotated[float, typer.Option(help="Memory for LoRA adapters, in GiB.", min=0.001)] = 1,
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of LoRA adapters on a GPU.", min=1)] = 16,
    grace_s: Annotated[float, typer.Option(help="Seconds that running requests get to end after SIGTERM.", min=0)] = 10,
    register: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Operators' port of a router, such as http://router:9000; may be repeated."),
    ] = None,
    pool: Annotated[str, typer.Option(help="Pool to join in the routers, with --register.")] = "own",
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of this shard for routers, with --register.")
    ] = None,
    register_key: Annotated[
        str | None, typer.Option(envvar="POINTSMAN_REGISTER_KEY", help="An operator's key, with --register.")
    ] = None,
    register_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="CAs of the routers at https:// URLs, with --register; default: the system's."
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate of this shard, in PEM; default: plain text.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key, in PEM.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="CAs of the routers' certificates; default: routers need none.")
    ] = None,
    tls_pin: Annotated[
        list[str] | None,
        typer.Option(metavar="sha256:HEX", help="A public key that routers may have; may be repeated."),
    ] = None,
    tls_min_version: Annotated[TlsVersion, typer.Option(help="Lowest version of TLS.")] = "1.2",
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log one JSON object per line.")] = False,
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve one replica of a model to routers.

    \b
    Example:
      pointsman shard --model ./Qwen3-0.6B --listen 0.0.0.0:7001 --threads 8 --kv-memory 8
    """
    log_to_stderr(as_json=json_logs)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # read when torch is loaded: steps of changing sizes leave no gaps between pieces of fixed sizes
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if supervised:
        end_with_stdin()
    own = TlsSettings(tls_cert, tls_key, tls_client_ca, frozenset(tls_pin or ()), tls_min_version)
    with exit_on_error():
        port_tls, routers_tls = certificates_of(name, own), router_certificates(own, register_ca)
    with exit_on_error():
        kv_port = KvPort.of(name, kv_listen, kv_secret_file, kv_ca, own)
        refuse_alone(draft_model, draft_kv_memory, verifies=speculate != "off" and not deterministic)
        refuse_apart(tensor_parallel, kv_dir, kv_listen, has_adapters=bool(lora or lora_dir), experts=experts)
    with exit_on_error(before=f"cannot load {model}: "):
        check_before_loading(model, draft_model)
    threads = threads or max(1, default_threads() // tensor_parallel)
    loaded = load_model(
        model,
        served_name,
        dtype,
        kv_dtype,
        device,
        supervised=supervised,
        at_end=context.call_on_close,
        size=tensor_parallel,
        experts=experts or "whole",
        threads=threads,
        on_files=digesting(None if kv_dir is None else Path(kv_dir), is_needed=bool(kv_dir or kv_listen)),
    )
    draft = None
    if draft_model is not None:
        draft = load_model(
            *(draft_model, None, dtype, kv_dtype, device),
            supervised=supervised,
            at_end=context.call_on_close,
            what="weights of the draft model",
        )

    from shards.announce import Announcement, Announcer, reachable_address
    from shards.collector import spare_what_stays
    from shards.engine import Engine, EngineOptions
    from shards.lora.options import AdapterOptions, named_folders
    from shards.server import serve
    from shards.warmup import warm_up

    with exit_on_error():
        traces = traces_of(name)
    use_threads(threads)
    with exit_on_error():
        adapters = AdapterOptions(
            named_folders(lora or []),
            None if lora_dir is None else Path(lora_dir),
            most=max_loras,
            most_bytes=int(lora_memory * 2**30),
            most_rank=max_lora_rank,
        )
    options = EngineOptions(
        host_bytes=int(host_memory * 2**30),
        kv_dir=None if kv_dir is None else Path(kv_dir),
        kv_dir_bytes=int(kv_dir_gib * 2**30),
        kv_listen=kv_port.address,
        kv_secret=kv_port.secret,
        kv_tls=kv_port.tls,
        max_running=max_running,
        max_waiting=max_waiting,
        step_s=step_ms / 1000,
        deterministic=deterministic,
        run_ahead=run_ahead,
        speculate=speculate,
        blend=blend,
        window_kv=window_kv,
        adapters=adapters,
    )
    with exit_on_error():
        # its memory is taken first: what is left is for the large model's KV
        drafting = drafting_by(draft, draft_kv_memory, max_running=max_running)
        options = replace(options, kv_bytes=kv_bytes(loaded, kv_memory, options, gpu_shards=gpu_shards))
        hosted = 0 if draft is None or has_own_memory(draft) else draft_kv_bytes(draft, draft_kv_memory)
        refuse_beyond(usable_bytes(), tensor_parallel * host_kv_bytes(loaded, options) + hosted)
        engine = Engine(loaded, replace(options, pool=pool_options(loaded, pin_share, options)), draft_model=drafting)
        announce(supervised, {"loading": "warming up", "share": 1.0}, "warming up ...")
        warm_up(engine)

    def on_listening(address: str) -> None:
        spare_what_stays()
        announce(supervised, {"listening": address}, f"shard {name} serves {loaded.name} on {address}")

    routers = register or ()

    def announcer(address: str) -> Announcer:
        reachable = advertise or reachable_address(address, next(iter(routers), ""))
        return Announcer(Announcement(routers, pool, reachable, register_key, routers_tls))

    served = serve(
        engine,
        listen,
        shard=name,
        grace_s=grace_s,
        on_listening=on_listening,
        tls=port_tls,
        traces=traces,
        announcer=announcer,
    )
    try:
        with exit_on_error():
            asyncio.run(served)
        engine.preserve(grace_s)
    finally:
        engine.close()
        if traces is not None:
            traces.close()


if __name__ == "__main__":
    app(prog_name="pointsman shard")

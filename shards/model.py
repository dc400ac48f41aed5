"""The model that an engine serves: a network, a tokenizer for stop strings, and a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokenizers import Tokenizer
from torch import Tensor, dtype

from shards.before_loading import TokenSet, require_checkpoint, tokenizer_in
from shards.compiled import LEAST_WIDTH
from shards.exec.batch import Batch
from shards.exec.moves import KvMove
from shards.exec.network import Network
from shards.kv.cache import KvCache, bytes_per_block
from shards.kv.host_memory import HostMemory
from shards.kv.quantised import kv_dtype_of, make_cache
from shards.kv.window_cache import WindowCache
from shards.kv.window_layout import KvWindow
from shards.network.group import ALONE, Group

if TYPE_CHECKING:
    from shards.lora.checkpoint import AdapterFormat
    from shards.lora.mixing import AdapterMix
    from shards.lora.options import AdapterOptions
    from shards.network.decoder import Decoder
    from shards.network.loading import DtypeChoice, OnProgress
    from shards.weight_files import WeightFiles


DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
"""Types as which a model's weights can be loaded."""


class PagedNetwork:
    """A decoder with memory for its KV: the engine's `Network`.

    KV is stored as `kv_dtype`. Attention computes in `computed`, which equals `kv_dtype` unless that is int8 or fp8.
    """

    def __init__(self, decoder: Decoder, *, kv_dtype: dtype, computed: dtype | None = None) -> None:
        self._decoder, self._kv_dtype, self._computed = decoder, kv_dtype, computed or kv_dtype
        self._cache: KvCache | WindowCache | None = None
        self._mix: AdapterMix | None = None

    def __repr__(self) -> str:
        return f"PagedNetwork({self._decoder!r}, {self._cache!r})"

    @property
    def vocabulary(self) -> int:
        """Size of the logits."""
        return self._decoder.config.vocab_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer, together."""
        return self._decoder.config.max_positions

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block."""
        return bytes_per_block(self._decoder.config, self._kv_dtype)

    def allocate(self, blocks: int) -> None:
        """Allocate memory for the KV of `blocks` blocks."""
        self._cache = make_cache(self._decoder.config, blocks, dtype=self._kv_dtype, computed=self._computed)

    @property
    def window(self) -> KvWindow | None:
        """The layers with a window; None if there are none."""
        config = self._decoder.config
        if config.window is None:
            return None
        return KvWindow(config.window, bytes_per_block(config.of_layers(windowed=True), self._kv_dtype))

    def allocate_divided(self, blocks: int, pages: int) -> None:
        """Allocate memory for `blocks` blocks, and for `pages` pages of the layers with a window."""
        config = self._decoder.config
        self._cache = WindowCache(config, blocks, pages, dtype=self._kv_dtype, computed=self._computed)

    def host_memory(self, slots: int) -> HostMemory:
        """Host memory for `slots` blocks. Raises RuntimeError before `allocate`."""
        return HostMemory(self._undivided, slots)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, float32 [len(batch.logit_rows), vocabulary]. Raises RuntimeError before `allocate`."""
        if self._mix is None:
            return self._decoder.forward(batch, self._allocated)
        with self._mix.computing(batch):
            return self._decoder.forward(batch, self._allocated)

    def adapt(self, options: AdapterOptions) -> tuple[AdapterOptions, AdapterFormat]:
        """Let batches have adapters (`Row.adapter`); returns `options`, and how adapters for it are read."""
        from shards.lora.checkpoint import AdapterFormat
        from shards.lora.mixing import AdapterMix, adapted
        from shards.lora.sites import sites_of
        from shards.network.decoder import Decoder
        from shards.network.families.table import family_of

        self._mix = AdapterMix()
        config, weights = self._decoder.config, self._decoder.weights
        self._decoder = Decoder(config, adapted(weights, self._mix))
        return options, AdapterFormat(sites_of(config), weights.dtype, family_of(config.architecture).prefixes)

    def blend(self, move: KvMove) -> None:
        """Copy the KV of `move`, keys rotated. Raises RuntimeError before `allocate`."""
        self._decoder.blend(move, self._undivided)

    def deviations(self, move: KvMove) -> list[float]:
        """How far the target's KV is from that of `move`, token by token. Raises RuntimeError before `allocate`."""
        return self._decoder.deviations(move, self._undivided)

    @property
    def _allocated(self) -> KvCache | WindowCache:
        if self._cache is None:
            raise RuntimeError("no memory was allocated for KV")
        return self._cache

    @property
    def _undivided(self) -> KvCache:
        if not isinstance(self._allocated, KvCache):
            raise RuntimeError("blocks do not have the KV of layers with a window, so they cannot be moved")
        return self._allocated


@dataclass(frozen=True, slots=True)
class Model:
    """The model that an engine serves under `name`. Stop strings need a `tokenizer`.

    `path` is the folder that it was loaded from, and `files` those that its KV depends on; None for a model made in
    memory. `weights` identifies the weights of such a model for a directory of KV; empty if nothing does.
    """

    name: str
    network: Network
    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    path: Path | None = None
    dtype: str = "float32"
    weights: str = ""
    files: WeightFiles | None = None

    @property
    def vocabulary(self) -> int:
        """Upper bound of token ids, exclusive."""
        return self.network.vocabulary

    @property
    def tokens(self) -> TokenSet:
        """Its tokens, to compare with those of another model."""
        return TokenSet(self.name, self.vocabulary, self.tokenizer)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str | None = None,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        device: str = "cpu",
        on_progress: OnProgress | None = None,
        group: Group = ALONE,
        whole_experts: bool = True,
        on_files: Callable[[WeightFiles], None] = lambda _: None,
    ) -> Model:
        """The model in the Hugging Face folder `path`, called `name` or else like the folder.

        `dtype` is auto (the checkpoint's own, or on a CPU float32 for float16, on a GPU bfloat16 for float32), float32,
        bfloat16, float16, or int8: matrices in int8, activations in float32, attention as with auto. Matrices that the
        checkpoint has in fewer bits stay so, except as `cpu_linear` says. `kv_dtype` is auto (the type that attention
        computes in), int8 or fp8 (e4m3). `device` is cpu, cuda, or auto, which is cuda if there is a GPU and Triton.
        `on_progress` gets the bytes read so far and the total, `on_files` the files before they are read. In a `group`
        the network is this process's part, with `whole_experts` or a slice of each. Raises CheckpointError, also if a
        file is changed meanwhile, or ValueError for another dtype or device, or a GPU without e4m3 for KV in fp8.
        """
        from shards.gpu.device import choose_device
        from shards.gpu.support import require_gpu_support
        from shards.network.config_file import read_config
        from shards.network.decoder import Decoder
        from shards.network.errors import BrokenCheckpoint
        from shards.network.loading import gpu_dtype, has_room, load_weights, safetensors_of
        from shards.weight_files import WeightFiles

        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; it must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        on = choose_device(device)
        if on.type == "cuda" and dtype == "int8":
            raise ValueError("dtype int8 is for CPUs; choose device cpu, or a checkpoint that is quantised already")
        require_checkpoint(path)
        config = whole_config = read_config(path)
        tokenizer = tokenizer_in(path)
        if on.type == "cuda":
            require_gpu_support(config)
        files = WeightFiles([path / "config.json", *safetensors_of(path)])
        on_files(files)
        chosen = cast("DtypeChoice", gpu_dtype(path, dtype) if on.type == "cuda" else dtype)
        is_for_gpu = on.type == "cuda"
        is_packed = not is_for_gpu and group.size == 1 and config.hidden_size >= LEAST_WIDTH and has_room(path)
        load = partial(
            load_weights,
            path,
            config,
            dtype=chosen,
            is_for_gpu=is_for_gpu,
            is_packed=is_packed,
            on_progress=on_progress,
        )
        if group.size > 1:
            from shards.parallel.cut import PartBuilder
            from shards.parallel.part import Part

            part = Part(group.rank, group.size, whole_experts)
            part.require(config)
            weights = load(builder_of=partial(PartBuilder.of, group=group, part=part))
            config = part.config(config)
        else:
            weights = load()
        files.require_same()
        if read_config(path) != whole_config:
            raise BrokenCheckpoint(f"{path / 'config.json'} was changed while it was read", hint="load it again")
        computed = weights.embedding.dtype
        stored = kv_dtype_of(kv_dtype, computed=computed)
        network: Network
        if on.type == "cuda":
            from shards.gpu.cache import require_kv_type
            from shards.gpu.network import GpuNetwork
            from shards.gpu.weights import moved
            from shards.kernels.launch import gpu_of

            require_kv_type(stored, gpu_of(on))
            on_gpu = moved(weights, config, device=on, dtype=computed)
            network = GpuNetwork.of(config, on_gpu, kv_dtype=stored, group=group)
        else:
            network = PagedNetwork(Decoder(config, weights, group), kv_dtype=stored, computed=computed)
        return cls(
            name=name or path.resolve().name,
            network=network,
            tokenizer=tokenizer,
            eos_token_ids=config.eos_token_ids,
            path=path,
            dtype=dtype if dtype == "int8" else str(computed).removeprefix("torch."),
            files=files,
        )

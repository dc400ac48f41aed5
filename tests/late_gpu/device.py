"""A stand-in for a GPU: tensors on "cuda" that lie in host memory, and work that runs as late as CUDA's rules allow.

Every operation of torch on such a tensor, every copy and every Triton kernel is put on the queue of the current stream.
It runs once the host reads the result, synchronises, or waits for an event behind it. Memory is filled with NaN when it
is allocated and again, in the order of its stream, when its last tensor is gone. So a buffer that is filled too early,
a copy without an event, or a graph that reads memory that was freed gives wrong numbers, every time.

Built from the rules of the CUDA Runtime API (streams, events, cudaMemcpyAsync, graphs) and of torch's allocator.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.late_gpu.queues import Queue, Recording, Work

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

# A GPU's own operators wait for their result, because its shape depends on values or it is a number on the host.
WAITING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}
"""Operators that take their indices from the host too."""


class Memory:
    """One allocation. Once no tensor is left in it, it is filled with NaN, or the largest integer."""

    def __init__(self, storage: Tensor, device: LateGpu) -> None:
        self._storage, self._device, self._queue = storage, device, device.queue
        device.allocated += storage.untyped_storage().nbytes()
        device.most_allocated = max(device.most_allocated, device.allocated)
        if device.recording is not None:
            device.recording.made.add(self)
            device.recording.spoils.append(lambda: poison(storage))

    def __del__(self) -> None:
        storage = self._storage
        self._device.allocated -= storage.untyped_storage().nbytes()
        self._device.freed(self._queue, lambda: poison(storage))


class LateTensor(Tensor):
    """A tensor on the device: `inner` holds its numbers, once the work in front has run."""

    inner: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> LateTensor:
        made: LateTensor = Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=CUDA
        )
        made.inner, made.memory = inner, memory
        return made

    def __init__(self, inner: Tensor, memory: Memory) -> None: ...

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LateTensor({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Its numbers, once they are there."""
        return self.cpu().tolist()

    # torch would look for CUDA first in these, which a build for CPUs does not have
    def __invert__(self) -> Tensor:
        return self.bitwise_not()

    def nonzero(self) -> Tensor:
        found: Tensor = torch.ops.aten.nonzero(self)
        return found

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __getitem__(self, key: Any) -> Any:
        assert LateGpu.present is not None, "the device is gone"
        if is_view(key):
            picked = now(operator.getitem, (self, key), {})
            return torch.ops.aten.as_strided(self, picked.shape, picked.stride(), picked.storage_offset())
        return LateGpu.present.computed("aten::index", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        if is_view(key):
            target = self[key]
            target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)
        else:
            assert LateGpu.present is not None, "the device is gone"
            into, at, numbers = inner((self, key, value))
            LateGpu.present.put("aten::index_put_", lambda: operator.setitem(into, at, numbers), (self, key, value))

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = LateGpu.present
        assert device is not None, "the device is gone"
        return device.dispatch(func, args, kwargs or {})


class LateGpu(TorchDispatchMode):
    """The device. While it is entered, torch makes tensors for "cuda" on it."""

    present: ClassVar[LateGpu | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.default = self.queue = Queue()
        self.recording: Recording | None = None
        self.recordings: list[Recording] = []
        self.pinned: list[Tensor] = []
        self.registered: dict[int, int] = {}
        self.launches: Counter[str] = Counter()
        self.variants: set[Hashable] = set()
        self.allocated = self.most_allocated = 0

    def put(self, name: str, work: Work, needs: Any) -> None:
        """Queue `work` on the current stream, or record it. It reads and writes the tensors among `needs`."""
        self.launches[name] += 1
        if self.recording is not None:
            self.recording.work.append(work)
            for each in tree_flatten(needs)[0]:
                if isinstance(each, LateTensor):
                    self.recording.use(each.memory)
        else:
            self.queue.put(work)

    def freed(self, queue: Queue, spoil: Work) -> None:
        """Memory of `queue` may be reused from here on, in this queue's order."""
        if LateGpu.present is not self:
            return
        if self.recording is not None:
            self.recording.work.append(spoil)
        else:
            queue.put(spoil)

    def wait(self, queue: Queue | None = None) -> None:
        """Run everything on `queue`, by default that of the current stream."""
        self.require_no_recording()
        with running():
            (queue or self.queue).end.run()

    def require_no_recording(self) -> None:
        """As CUDA does when the host would wait for work that is only being recorded."""
        if self.recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def replay(self, recording: Recording) -> None:
        """Queue recorded work again. Other graphs of its pool may have used the same memory.

        Raises RuntimeError if it needs memory that was freed: a GPU would use whatever is there now.
        """
        self.launches["graph"] += 1
        if recording.is_stale:
            raise RuntimeError("a graph uses memory that was freed after its capture")
        for other in self.recordings:
            if other is not recording and other.pool == recording.pool:
                for spoil in other.spoils:
                    self.queue.put(spoil)
        for work in recording.work:
            self.queue.put(work)

    def is_pinned(self, host: Tensor) -> bool:
        """Whether a copy from or to `host` runs beside the host."""
        at = host.data_ptr()
        if any(start <= at < start + size for start, size in self.registered.items()):
            return True
        return any(host.untyped_storage().data_ptr() == each.data_ptr() for each in self.pinned)

    def allocate(self, like: Tensor) -> LateTensor:
        """A tensor like `like`, with numbers that nothing may depend on."""
        with running():
            storage = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            poison(storage)
        return LateTensor(storage, Memory(storage, self))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What torch asks of the device, or of the host."""
        name: str = func._schema.name
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # made of others; without gradients torch leaves it to us to take it apart
            with self:
                return func.decompose(*args, **kwargs)
        late = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, LateTensor)]
        if not late:
            return self._from_host(func, args, kwargs)
        if name == "aten::copy_":
            return self._copy(*args, **kwargs)
        if name == "aten::_to_copy":
            return self._to_copy(func, args, kwargs)
        if name in WAITING:
            self.wait()
            return self._wrapped(now(func, args, kwargs), None)
        if "flash_attention" in name:
            return self._flash(*args, **kwargs)
        self._require_one_device(func, name, args, kwargs)
        if any(each.alias_info is not None for each in func._schema.returns) and not func._schema.is_mutable:
            # torch notes what is a view of what, except of tensors that were made for inference alone
            with torch.inference_mode(late[0].is_inference()):
                return self._wrapped(now(func, args, kwargs), late[0].memory)
        return self._queued(func, name, args, {key: on_host(value) for key, value in kwargs.items()})

    def _from_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        asked = kwargs.get("device")
        if kwargs.get("pin_memory"):
            made = func(*args, **(kwargs | {"pin_memory": False}))
            poison(made)
            self.pinned.append(made)
            return made
        if asked is None or torch.device(asked).type != "cuda":
            return func(*args, **kwargs)
        if func is aten._to_copy.default and kwargs.get("non_blocking") and self.is_pinned(args[0]):
            target = self.allocate(aten._to_copy(args[0].to("meta"), dtype=kwargs.get("dtype")))
            return self._copy(target, args[0], True)
        made = func(*args, **(kwargs | {"device": "cpu"}))
        target = self.allocate(made)
        if "empty" not in func._schema.name:
            into = target.inner
            self.put(func._schema.name, lambda: into.copy_(made), target)
        return target

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        into, from_ = inner(target), inner(source)
        host = next((each for each in (target, source) if not isinstance(each, LateTensor)), None)
        is_late = host is None or (non_blocking and self.is_pinned(host))
        if not is_late and host is source:
            # the driver takes a copy of memory that may move
            from_ = source.clone()
        self.put("aten::copy_", lambda: into.copy_(from_), (target, source))
        if not is_late and host is target:
            self.wait()
        return target

    def _to_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        asked = kwargs.get("device")
        if asked is None or torch.device(asked).type == "cuda":
            queued: Tensor = self._queued(func, "aten::_to_copy", args, kwargs | {"device": None})
            return queued
        self.wait()
        copied: Tensor = func(*inner(args), **kwargs)
        return copied

    def _queued(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if not func._schema.is_mutable:
            return self.computed(name, func, args, kwargs)
        inner_args, inner_kwargs = inner(args), inner(kwargs)
        self.put(name, lambda: func(*inner_args, **inner_kwargs), (args, kwargs))
        return kwargs.get("out", args[0])

    def computed(self, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """New tensors with what `call` will return."""
        inner_args, inner_kwargs = inner(args), inner(kwargs)
        try:
            with running():
                shapes = call(*on_meta(args), **on_meta(kwargs))
        except (NotImplementedError, RuntimeError):
            # the shape depends on numbers, so a GPU waits for them too
            self.wait()
            return self._wrapped(now(call, args, kwargs), None)
        made = tree_map_only(Tensor, self.allocate, shapes)
        targets = [each.inner for each in tree_flatten(made)[0] if isinstance(each, LateTensor)]

        def compute() -> None:
            results = tree_flatten(call(*inner_args, **inner_kwargs))[0]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        self.put(name, compute, (args, kwargs, made))
        return made

    def _flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float = 0.0,
        is_causal: bool = False,
        is_debugged: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        """Attention as aten's operator for CUDA defines it: results, natural logsumexp and unused ones."""
        out, logsumexp = self.allocate(inner(query)), self.allocate(torch.empty(query.shape[:-1]))
        q, k, v = inner((query, key, value))

        def compute() -> None:
            scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
            if is_causal:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
            logsumexp.inner.copy_(scores.logsumexp(-1))
            out.inner.copy_(scores.softmax(-1) @ v.float())

        self.put("aten::_scaled_dot_product_flash_attention", compute, (query, key, value, out, logsumexp))
        nothing = [self.allocate(torch.empty(0)) for _ in range(5)]
        return out, logsumexp, nothing[0], nothing[1], 0, 0, *nothing[2:]

    def _wrapped(self, results: Any, memory: Memory | None) -> Any:
        def wrap(result: Tensor) -> LateTensor:
            return LateTensor(result, memory or Memory(result, self))

        return tree_map_only(Tensor, wrap, results)

    def _require_one_device(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        for each in tree_flatten((args, kwargs))[0]:
            is_foreign = isinstance(each, Tensor) and not isinstance(each, LateTensor) and each.dim()
            if is_foreign and name not in INDEXING:
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} got one of the host's")


@contextmanager
def running() -> Iterator[None]:
    """Work of the device runs: nothing in it is queued."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
        yield


def is_view(key: Any) -> bool:
    """Whether indexing with `key` gives a view: numbers and slices alone."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)


def now(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `func` gives at once, for the host tensors behind `args`."""
    with running():
        return func(*inner(args), **inner(kwargs))


def poison(memory: Tensor) -> None:
    """Fill `memory` with NaN, or with the largest integer."""
    if memory.itemsize == 1:
        # NaN in e4m3
        memory.view(torch.uint8).fill_(0x7F)
    else:
        memory.fill_(torch.nan if memory.dtype.is_floating_point else torch.iinfo(memory.dtype).max)


def inner(values: Any) -> Any:
    """`values` with the host tensors that stand for tensors on the device."""
    return tree_map_only(LateTensor, lambda late: late.inner, values)


def on_host(value: Any) -> Any:
    """A device of the host for the one of the stand-in."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def on_meta(values: Any) -> Any:
    """`values` with tensors of the same shapes and without numbers."""

    def shape_of(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, LateTensor) and not tensor.dim():
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    changed = tree_map_only(Tensor, shape_of, values)
    return tree_map_only(torch.device, lambda _: torch.device("meta"), changed)


def variant_of(kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> Hashable:
    """What Triton compiles a kernel anew for: types, constants, numbers that are 1, and multiples of 16."""
    seen: list[Hashable] = []
    for parameter, value in zip(kernel.params, args, strict=False):
        is_special = not parameter.do_not_specialize
        if isinstance(value, LateTensor):
            is_aligned = value.inner.data_ptr() % 16 == 0 or parameter.do_not_specialize_on_alignment
            seen.append((value.dtype, is_aligned or not is_special))
        elif isinstance(value, int) and is_special:
            seen.append((value == 1, value % 16 == 0, abs(value) < 2**31))
        else:
            seen.append(type(value))
    return kernel.fn.__name__, tuple(seen), tuple(sorted(constants.items()))


Launcher = Callable[..., Any]


def kernels_wait(device: LateGpu, launch: Launcher) -> Launcher:
    """`JITFunction.run` that queues `launch`. Raises ValueError for tensors of the host, as Triton does."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        for place, value in enumerate(args):
            if isinstance(value, Tensor) and not isinstance(value, LateTensor):
                raise ValueError(f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)")
        values: Sequence[Any] = inner(args)
        device.variants.add(variant_of(self, args, kwargs))
        device.put(self.fn.__name__, lambda: launch(self, *values, grid=grid, warmup=False, **kwargs), args)
        return None

    return run

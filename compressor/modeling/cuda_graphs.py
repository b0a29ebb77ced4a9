"""Replays forward passes as CUDA graphs: launches take longer than the computation of a small batch. The
first call with inputs of new shapes captures its kernels; later ones copy their inputs in, replay the
graph and return copies of the outputs. Threads take turns."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from transformers import masking_utils
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.modeling.cache_key import held_for
from blr.compressor.modeling.modeling_blr import Mixin
from blr.compressor.modeling.settings import CACHE_NAMES, export_settings, warn_once
from blr.kernels.common.capturing import Captured, own_stream
from blr.kernels.common.placing import on_gpu

MAX_GRAPHS = 16  # input shapes of an encoder kept at once
MAX_REMADE = 8  # models made of other modules or weights than before, until no graph is made any more
WARMUP = 2  # eager runs before a capture: libraries set themselves up in the first
BOUND = 0.8  # the host's share of a pass above which launches are what takes its time
MASK = "attention_mask"
ASKED = ("output_hidden_states", "output_attentions", "return_dict")  # of a config: what results hold
Forward = Callable[..., object]
Inputs = tuple[Sequence[object], Mapping[str, object]]  # positional and named
Inside = Callable[[], AbstractContextManager[None]]
Asked = Sequence[object]
Replay = Callable[[], object]
Capture = Callable[[Callable[[], object]], Replay | None]


class CapturedForward(Mixin):
    """Mixin of exported models that do not generate: a call replays a graph where it can. It can on a
    GPU, in evaluation mode, without gradients, hooks or tracing, for tensors and plain values."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        native = super().__call__
        graphs = _graphs_of(self) if _capturable(self) else None
        if graphs is None or graphs.failed:
            return native(*args, **kwargs)
        if is_full(kwargs.get(MASK)) and graphs.ignores(native, args, kwargs):
            kwargs = _maskless(kwargs)
        plain = len(args) < 2 and all(kwargs.get(name) is None for name in (MASK, "position_ids"))
        inside = unmasked if plain else nullcontext
        asked = [getattr(self.config, name, None) for name in ASKED]
        with on_gpu(self.device):
            result = graphs.replayed(native, (args, kwargs), inside, asked)
        return native(*args, **kwargs) if result is None else result


class ForwardGraphs:
    """The graphs of one model, by the shapes of its inputs. capture: turns a function without arguments,
    whose tensors stay where they are, into one that repeats its kernels and returns its first result,
    overwritten; None where that is not worth it. most: how many shapes, those used last, are kept."""

    def __init__(self, capture: Capture | None = None, most: int = MAX_GRAPHS) -> None:
        self.capture, self.most = capture or captured_if_faster, most
        self.entries: OrderedDict[Hashable, tuple[list[Tensor], Replay | None]] = OrderedDict()
        self.failed = False
        self.maskless: bool | None = None  # whether a mask that hides nothing is as good as none
        self.turn = threading.RLock()
        self.stream: torch.cuda.Stream | None = None  # of the last replay

    def ignores(self, forward: Forward, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Whether `forward` computes the same without a mask that hides nothing; tried once."""
        if self.maskless is None:
            try:
                self.maskless = _equal(forward(*args, **kwargs), forward(*args, **_maskless(kwargs)))
            except Exception:  # a model that needs its mask
                self.maskless = False
        return self.maskless

    def replayed(
        self, forward: Forward, inputs: Inputs, inside: Inside = nullcontext, asked: Asked = ()
    ) -> Any:
        """``forward(*inputs[0], **inputs[1])`` by a graph, captured first for new shapes; None where it
        is to run as usual. inside: the context of a capture. asked: what else results depend on."""
        leaves, spec = tree_flatten(inputs)
        key = None if self.failed else _key([*leaves, *asked], spec)
        if key is None:
            return None
        with self.turn:
            if key not in self.entries:
                with inside():
                    self._add(key, forward, leaves, spec)
            if self.failed:
                return None
            self.entries.move_to_end(key)
            buffers, replay = self.entries[key]
            return None if replay is None else self._replay(replay, buffers, _tensors(leaves))

    def _replay(self, replay: Replay, buffers: list[Tensor], given: list[Tensor]) -> object:
        if buffers and buffers[0].is_cuda:  # wait for the stream that used the buffers last
            here = torch.cuda.current_stream(buffers[0].device)
            if self.stream not in (None, here):
                here.wait_stream(self.stream)
            self.stream = here
        for buffer, tensor in zip(buffers, given, strict=True):
            buffer.copy_(tensor)
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, replay())

    def _add(self, key: Hashable, forward: Forward, leaves: list[object], spec: TreeSpec) -> None:
        """Capture for `key`; a failure is remembered."""
        args, kwargs = tree_unflatten(leaves, spec)
        result = forward(*args, **kwargs)
        try:
            _check_output(result)
            with torch.inference_mode(False), torch.no_grad():
                held = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(held, spec)
                replay = self.capture(lambda: forward(*args, **kwargs))
        except Exception as error:  # whatever a model does that a graph cannot hold
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            warn_once(f"the forward pass is not captured as a CUDA graph ({reason}); it runs eagerly")
            self.failed = True
            return
        self.entries[key] = ([], None) if replay is None else (_tensors(held), replay)
        if len(self.entries) > self.most:
            self.entries.popitem(last=False)


def _capturable(model: PreTrainedModel) -> bool:
    if getattr(model, "_is_replica", False):  # of DataParallel, its weights are there for one call
        return False
    if model.device.type != "cuda" or model.training or torch.is_grad_enabled():
        return False
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced or torch.cuda.is_current_stream_capturing():
        return False
    return not hasattr(model, "_hf_hook") and export_settings(model.config) is not None


def _graphs_of(model: nn.Module) -> ForwardGraphs | None:
    """The graphs of `model` as it is now; None while it has hooks, or where it changes at every call."""
    held = held_for(model, "_blr_graphs", ForwardGraphs)
    if held.times > MAX_REMADE:
        warn_once("the forward pass is not captured as a CUDA graph (modules or weights keep changing)")
        return None
    return None if held.basis.is_watched(model) else held.made


def _tensors(leaves: list[object]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _key(leaves: list[object], spec: object) -> Hashable:
    """What two calls must have in common to share a graph; None for inputs that no graph can take."""
    parts: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.device.type == "cpu" and torch.cuda.is_available():
                return None
            parts.append((tuple(leaf.shape), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            parts.append((type(leaf), leaf))
        else:
            return None
    return tuple(parts), str(spec), torch.is_autocast_enabled("cuda")


def _check_output(result: object) -> None:
    """Raise ValueError for results that a replay cannot repeat: a cache grows from call to call."""
    if isinstance(result, dict) and any(result.get(name) is not None for name in CACHE_NAMES):
        raise ValueError("it returns a cache")
    if not all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_flatten(result)[0]):
        raise ValueError("it returns more than tensors")


def _maskless(kwargs: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name != MASK}


def _equal(a: object, b: object) -> bool:
    (ours, kind), (others, other) = tree_flatten(a), tree_flatten(b)
    if kind != other:
        return False
    pairs = [pair for pair in zip(ours, others, strict=True) if isinstance(pair[0], Tensor)]
    return all(torch.equal(*pair) for pair in pairs)


def captured(run: Callable[[], object]) -> Replay:
    warm_up(run)
    return Captured(run)


def captured_if_faster(run: Callable[[], object], pool: object = None) -> Replay | None:
    """Capture the kernels of `run`; None where the GPU takes longer than the host, so that a graph would
    gain nothing and hold the memory of a large pass. pool: memory that graphs share."""
    return Captured(run, pool=pool) if warm_up(run) > BOUND else None


def warm_up(run: Callable[[], object]) -> float:
    """Run on a stream of its own until libraries are set up; the host's share of the last run's time."""
    with own_stream() as stream:
        for _ in range(WARMUP):
            stream.synchronize()
            begun = perf_counter()
            run()
            host = perf_counter() - begun
            stream.synchronize()
            share = host / (perf_counter() - begun)
    return share


# Of masks transformers asks whether there is padding, and whether a row holds several sequences, for a
# faster kernel of attention. Passes that must not wait for the GPU, and captures, cannot be asked.
_answering_lock = threading.Lock()


@dataclass
class _Answered:
    """A function of transformers that gives some threads an answer without looking."""

    native: Callable[..., object]
    answer: object
    threads: list[int] = field(default_factory=list)  # once for each that is inside

    def __call__(self, *args: object, **kwargs: object) -> object:
        asked = threading.get_ident() not in self.threads
        return self.native(*args, **kwargs) if asked else self.answer


@contextmanager
def unpacked() -> Iterator[None]:
    """While active, transformers does not search this thread's passes for several sequences in a row."""
    with _answering("find_packed_sequence_indices", None):
        yield


@contextmanager
def unmasked() -> Iterator[None]:
    """While active, this thread's passes without a mask make none, captured or not."""
    with unpacked(), _answering("is_tracing", False):
        yield


def is_full(mask: object) -> bool:
    """Whether `mask` is one [B, T] of padding that hides nothing. Waits for the GPU."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return False
    return bool(mask.all())


@contextmanager
def _answering(name: str, answer: object) -> Iterator[None]:
    """While active, the function `name` of transformers returns `answer` in this thread."""
    if not hasattr(masking_utils, name):
        yield
        return
    me = threading.get_ident()
    with _answering_lock:
        found = getattr(masking_utils, name)
        if not isinstance(found, _Answered):
            found = _Answered(found, answer)
            setattr(masking_utils, name, found)
        found.threads.append(me)
    try:
        yield
    finally:
        with _answering_lock:
            found.threads.remove(me)
            if not found.threads:
                setattr(masking_utils, name, found.native)

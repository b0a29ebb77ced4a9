"""The processes of a run: one, or those that torchrun, `accelerate launch` or `--gpus` started, each on
its own device. The first writes, but for finished layers, which each puts into the journal: on several
hosts it lies in a folder they share."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from blr.compressor.base import process_environment as environment
from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError, LostProcess, UsageError
from blr.compressor.base.quoting import first_line

Name = TypeVar("Name")
Value = TypeVar("Value")
PATIENCE = timedelta(days=7)  # a layer may take hours, and a dead process is noticed otherwise


class Processes:
    """This process's number `rank` of `count`, its `device`, and what all do together. `alone`: whatever
    others there are. Raises UsageError for a numbered GPU with several processes, CapabilityError for an
    absent device or devices of several kinds."""

    def __init__(self, device: str, alone: bool = False) -> None:
        self.rank = 0 if alone else environment.rank()
        self.count = 1 if alone else environment.count()
        self.device = pick_device(device)
        self.wire = torch.device("cpu")  # what messages travel from
        self.notes: list[str] = []
        self._control: dist.ProcessGroup | None = None
        if self.count > 1:
            self._join(device)

    def _join(self, asked: str) -> None:
        backend = "gloo"
        if self.device.type == "cuda":
            if ":" in asked:
                remedy = "give --device cuda and name the GPUs in CUDA_VISIBLE_DEVICES"
                raise UsageError(f"device {asked!r} for {self.count} processes; {remedy}")
            there = torch.cuda.device_count()
            self.device = torch.device("cuda", environment.local_rank() % there)
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"  # the latter joins with its first message
        meeting = os.environ.get(environment.MEETING)
        if not meeting and "MASTER_ADDR" not in os.environ:
            found = f"WORLD_SIZE is {self.count} and nobody says where processes meet (MASTER_ADDR)"
            remedy = "start them by torchrun, accelerate launch or --gpus, or unset it"
            raise UsageError(f"{found}: {remedy}")
        with _lost():
            store = dist.FileStore(meeting, self.count) if meeting else None
            if store is not None:
                store.set_timeout(PATIENCE)
            method = None if store else "env://"
            dist.init_process_group(backend, method, PATIENCE, self.count, self.rank, store)
            self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        kinds = sorted(set(self.gather(_kind(self.device))))
        if len(kinds) > 1:
            found = f"processes on devices of several kinds ({', '.join(kinds)}), whose results differ"
            raise CapabilityError(f"{found}; run on those of one kind")
        if self.device.type == "cuda":
            self._find_wire()

    def _find_wire(self) -> None:
        """Send messages from the GPUs if each process has one of its own."""
        gpus = self.gather(_card(self.device))
        if len(set(gpus)) == len(gpus):
            self.wire = self.device
        else:
            self.notes.append(f"{len(gpus)} processes share {len(set(gpus))} GPUs")

    @property
    def first(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def owns(self, number: int) -> bool:
        """Whether item `number` of a series that is dealt out in turn is this process's."""
        return number % self.count == self.rank

    def owner(self, number: int) -> int:
        """The process that `owns` an item."""
        return number % self.count

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            with _lost():
                dist.barrier(group=self._control)

    def leave(self) -> None:
        """There is no more to do together: from here on each may end."""
        if self.count > 1:
            self.wait()
            dist.destroy_process_group()
            self.count = 1

    def gather(self, value: Value) -> list[Value]:
        """What every process gives as `value` (plain data), in order."""
        if self.count == 1:
            return [value]
        found = [value] * self.count
        with _lost():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def merged(self, mine: dict[Name, Value]) -> dict[Name, Value]:
        """The entries of all processes, in each."""
        return {key: value for part in self.gather(mine) for key, value in part.items()}

    def told(self, value: object, source: int = 0) -> Any:
        """What process `source` gives as `value` (plain data)."""
        if self.count == 1:
            return value
        found = [value]
        with _lost():
            dist.broadcast_object_list(found, src=source, group=self._control)
        return found[0]

    def shared(self, tensor: Tensor | None, source: int = 0) -> Tensor:
        """The `tensor` of process `source`, on this process's device; the others give None."""
        found = None if tensor is None else (tensor.shape, tensor.dtype)
        return self.spread(tensor, source, *self.told(found, source))

    def spread(
        self, tensor: Tensor | None, source: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """As `shared`, of a tensor whose shape and dtype all know."""
        if self.count == 1:
            assert tensor is not None
            return tensor.to(self.device)
        if self.rank == source and tensor is not None:
            held = tensor.detach().to(self.wire).contiguous()
        else:
            held = torch.empty(shape, dtype=dtype, device=self.wire)
        with _lost():
            dist.broadcast(held, source)
        return held.to(self.device)

    def exchanged(self, pieces: list[Tensor]) -> list[Tensor]:
        """Send piece n [h_n, …] to process n; the pieces for this one, in order."""
        if self.count == 1:
            return pieces
        heights = [len(piece) for piece in pieces]
        sent = torch.cat(pieces).to(self.wire)
        mine = heights[self.rank]
        found = sent.new_empty(self.count * mine, *sent.shape[1:])
        with _lost():
            dist.all_to_all_single(found, sent, [mine] * self.count, heights)
        return list(found.to(self.device).split(mine)) if mine else [found.to(self.device)] * self.count

    def sum_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Replace the gradients of `tensors` by their sums over the processes, in one message."""
        if self.count == 1:
            return
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        if not gradients:  # of the same tensors in every process
            return
        flat = torch.cat([g.flatten() for g in gradients]).to(self.wire)
        with _lost():
            dist.all_reduce(flat)
        flat = flat.to(self.device)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def sum(self, value: Tensor) -> Tensor:
        """Over the processes."""
        if self.count == 1:
            return value
        held = value.to(self.wire, copy=True)
        with _lost():
            dist.all_reduce(held)
        return held.to(value.device)

    def agreed(self, *values: float) -> list[float]:
        """The first process's `values`, in all of them."""
        return self.told(list(values))


def _card(device: torch.device) -> str:
    """The GPU of this process among all hosts; parts of one card (MIG) count as one."""
    found = torch.cuda.get_device_properties(device)
    return f"MIG of {platform.node()}" if " MIG " in found.name else str(found.uuid)


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@contextmanager
def _lost() -> Iterator[None]:
    """Raise LostProcess where torch's library reports that a process is gone."""
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error, 200)
        raise LostProcess(
            f"another process of this run is gone ({reason}); what is finished is kept, run again"
        ) from error


class OrderedSum:
    """Σ part_n, added in the order of n as one process adds them. Parts are dealt out in turn. In a
    round each process gives its next one; slab s of the rows of all goes to process s. `dtype` to add
    in; `like`: a tensor as the parts, else told."""

    def __init__(
        self,
        processes: Processes,
        number: int,
        dtype: torch.dtype | None = None,
        like: Tensor | None = None,
    ) -> None:
        self.processes, self.number, self.dtype = processes, number, dtype
        self.done = 0  # parts added so far
        self.slab: Tensor | None = None
        self.like = None if like is None else (like.shape, like.dtype)

    def add(self, part: Tensor | None) -> None:
        """One round, of all processes: this one's next part, None if it has no more."""
        processes = self.processes
        given = min(processes.count, self.number - self.done)
        for slab in processes.exchanged(self._cut(part))[:given]:
            wide = slab if self.dtype is None else slab.to(self.dtype)
            self.slab = wide.clone() if self.slab is None else self.slab.add_(wide)
        self.done += given

    def total(self) -> Tensor:
        """The sum, in every process."""
        assert self.like is not None
        shape, kind = self.like
        count, rank = self.processes.count, self.processes.rank
        if count == 1:
            assert self.slab is not None
            return self.slab
        heights = [len(rows) for rows in torch.empty(shape[0]).tensor_split(count)]
        described = [((height, *shape[1:]), self.dtype or kind) for height in heights]
        mine, spread = {rank: self.slab}, self.processes.spread
        return torch.cat([spread(mine.get(n), n, *described[n]) for n in range(count)])

    def _cut(self, part: Tensor | None) -> list[Tensor]:
        """The slabs of `part`, or of zeros in its place, which are not added."""
        if self.like is None:  # the first process has a part in every round
            self.like = self.processes.told(None if part is None else (part.shape, part.dtype))
        if part is None:
            part = torch.zeros(self.like[0], dtype=self.like[1], device=self.processes.device)
        return list(part.tensor_split(self.processes.count))


def sum_in_order(
    processes: Processes,
    number: int,
    parts: Callable[[int], Mapping[Name, Tensor]],
    names: Iterable[Name],
    dtype: torch.dtype | None = None,
) -> dict[Name, Tensor]:
    """The ordered sums over n of `parts(n)` by name; every process asks for its own parts alone."""
    sums = {name: OrderedSum(processes, number, dtype) for name in names}
    for turn in rounds(processes, number):
        n = turn * processes.count + processes.rank
        found = parts(n) if n < number else {}
        for name, total in sums.items():
            total.add(found.get(name))
    return {name: total.total() for name, total in sums.items()}


def rounds(processes: Processes, number: int) -> range:
    """The rounds in which `number` items are dealt out."""
    return range(-(-number // processes.count))

"""What Gluon names differently from release to release of Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _of_old(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    return memory._reinterpret(memory.dtype, SHAPE, LAYOUT)


@gluon.jit
def _of_new(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    return memory.reinterpret(memory.dtype, SHAPE, LAYOUT)


seen_as = _of_new if hasattr(gl.shared_memory_descriptor, "reinterpret") else _of_old

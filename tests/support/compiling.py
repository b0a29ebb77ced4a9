"""Compiles one Triton kernel for a GPU that is not there, and tells what the assembler made of it.

Works on a CPU: Triton compiles in a process of its own, where TRITON_INTERPRET is not set (the
tests' own process interprets kernels, which turns `@triton.jit` into something uncompilable).
"""

from __future__ import annotations

import json
import pickle
import tempfile
from typing import Any

import bare

# Reads the request, pickled, from a file, answers with one JSON object on the last line.
_CHILD = """
import importlib, json, pickle, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

ask = pickle.load(open(sys.argv[1], "rb"))
kernel = getattr(importlib.import_module(ask["module"]), ask["kernel"])
while hasattr(kernel, "fn") and not hasattr(kernel, "arg_names"):
    kernel = kernel.fn  # a heuristics or autotune wrapper
unknown = set(ask["signature"]) ^ set(kernel.arg_names)
if unknown:
    sys.exit(f"signature and arguments of {ask['kernel']} differ in {sorted(unknown)}")
constexprs, attrs = dict(ask["constexprs"]), {}

def typed(path, name, given):
    if isinstance(given, tuple):
        leaves = enumerate(zip(getattr(given, "_fields", range(len(given))), given))
        made = [typed((*path, i), f"{name}.{field}", leaf) for i, (field, leaf) in leaves]
        return type(given)(*made) if hasattr(given, "_fields") else tuple(made)
    if given == 1:
        constexprs[path] = 1
        return "constexpr"
    known = name in ask["divisible"] if ask["divisible"] else given[0] == "*" or given in ("i32", "i64")
    if known:
        attrs[path] = [["tt.divisibility", 16]]
    return given

signature = {n: typed((i,), n, ask["signature"][n]) for i, n in enumerate(kernel.arg_names)}
source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
target = GPUTarget("cuda", ask["capability"], 32)
compiled = triton.compile(source, target=target, options=ask["options"])
asm = {name: text for name, text in compiled.asm.items() if isinstance(text, str)}
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(asm["ptx"])
    file.flush()
    arch = f"sm_{ask['capability']}" + ("a" if ask["capability"] >= 90 else "")
    command = [get_ptxas(ask["capability"]).path, "-v", f"--gpu-name={arch}", file.name]
    command += ["-o", "/dev/null"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
print(json.dumps({
    "asm": asm,
    "regs": max(map(int, re.findall(r"Used (\\d+) registers", said))),
    "spills": sum(map(int, re.findall(r"(\\d+) bytes spill", said))),
    "shared": compiled.metadata.shared,
}))
"""


def compile_for(
    module: str,
    kernel: str,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    capability: int,
    *,
    divisible: tuple[str, ...] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What Triton and ptxas make of a kernel for a GPU of the given compute capability.

    Args:
        module: where the kernel is, as "blr.kernels.layers.blast.triton".
        kernel: its name there.
        signature: every runtime argument to its type, as "*bf16", "i32", "fp32" or
            "tensordesc<bf16[64,64]>", or to a named tuple of types, with 1 for a field that is 1;
            arguments named in `constexprs` may be left out.
        constexprs: every `tl.constexpr` argument to its value. An integer
            argument that is 1, as a unit stride, belongs here too: Triton specializes on it.
        capability: 80 or 90.
        divisible: arguments known to be multiples of 16 (pointers: aligned), without which loads
            are not vectorized; by default all pointers and integers. Of fields as "s.x".
        options: num_warps, num_stages and the like.

    Returns:
        "asm": stage (ttir, ttgir, llir, ptx) to text; "regs": registers a thread; "spills": bytes
        a thread stored to and loaded from local memory; "shared": bytes of shared memory a block.

    Raises:
        AssertionError: it does not compile, with what the compiler said.
    """
    signature = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    ask = {"module": module, "kernel": kernel, "signature": signature, "constexprs": constexprs}
    ask |= {"capability": capability, "divisible": divisible, "options": options}
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps(ask))
        file.flush()
        done = bare.run(_CHILD, file.name)
    assert done.returncode == 0, f"{kernel} for sm_{capability}: {done.stderr[-9000:]}"
    return json.loads(done.stdout.splitlines()[-1])


# Runs the code of the request where launches compile, for a GPU that is not there, and run nothing.
_LAUNCHES = """
import json, re, subprocess, sys, tempfile
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")

def spilled(ptx):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(map(int, re.findall(r"(\\d+) bytes spill", said)))

found, real = [], JITFunction.run
def run(self, *args, grid, warmup, **options):
    made = real(self, *args, grid=grid, warmup=True, **options)
    found.append([self.fn.__name__, spilled(made.asm["ptx"])])
    return made

driver.set_active(Driver())
JITFunction.run = run
exec(sys.argv[1])
print(json.dumps(found))
"""


def compile_launches(code: str) -> list[list[Any]]:
    """[name, bytes a thread spilled] of the kernels that `code` launches on tensors of the CPU, compiled
    for compute capability 90 and not run. It takes types from the launch, `compile_for` from the test.

    Raises AssertionError: the code fails, or a kernel does not compile, with what was said.
    """
    done = bare.run(_LAUNCHES, code)
    assert done.returncode == 0, done.stderr[-9000:]
    found: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found

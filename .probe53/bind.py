"""The kernel's launch up to the driver, without a GPU: how Triton 3.6 binds the arguments of a real plan."""
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch, triton, types
from triton.backends.compiler import GPUTarget
import ref, kernel
calls = []
class Utils:
    def load_binary(s, name, binary, shared, device): return (1, 1, 255, 0, 1024)
    def get_device_properties(s, d): return dict(max_shared_mem=232448, multiprocessor_count=132)
class Launcher:
    def __init__(s, src, metadata): s.src, s.metadata = src, metadata; calls.append(("compiled", src.signature, metadata))
    def __call__(s, *a): calls.append(("launched", len(a)))
class Driver:
    utils = Utils()
    launcher_cls = Launcher
    def get_current_device(s): return 0
    def get_current_stream(s, d=0): return 0
    def get_current_target(s): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(s): return torch.device("cpu")
    def set_current_device(s, d): pass
    def map_python_to_cpp_type(s, t): return t
triton.runtime.driver.set_active(Driver())
for name in ("7b-lr", "mini"):
    m = ref.build(name, 1, "cpu", 64)
    for o in (dict(), dict(first=1, last=2), dict(first=8, last=9), dict(before=1, after=3), dict(CLOCK=True)):
        k = m.t.run(kernel.token_kernel[(132,)], **o, num_warps=8, launch_cooperative_grid=True)
    k = m.make(fixed=False).run(kernel.token_kernel[(132,)], num_warps=8, launch_cooperative_grid=True)
    print(name, [c[0] for c in calls])
print({k: v for k, v in calls[0][1].items()}, calls[0][2].shared, calls[0][2].launch_cooperative_grid, k.n_regs)

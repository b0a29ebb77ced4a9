"""The kernel's launch up to the driver, without a GPU: how Triton 3.6 binds the arguments of a real plan."""
import os, sys
sys.path.insert(0, "/tmp/wt/h3/tests/runtime"); sys.path.insert(0, "/tmp/wt/h3/tests/support")
import torch, triton
from triton.backends.compiler import GPUTarget
import test_whole
from blr.compressor.runtime import whole
from blr.compressor.runtime.decoder import Decoder
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
for family, ranks in (("Llama", (136,)), ("Qwen2", ()), ("Qwen3", ())):
    d = Decoder(test_whole.make_model(family, ranks), context=64, ops="torch")
    t = whole.make_token(d.plan, d.state, 132)
    t.launch(); t.launch(); t.launch(1, 2)
    print(family, [c[0] for c in calls]); calls.clear() if family != "Qwen3" else 0
print(calls[0][1], calls[0][2].shared, calls[0][2].launch_cooperative_grid)

"""run.py's own code on a CPU, with the emulator in place of the GPU."""
import contextlib, sys, threading, types, os, re
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch, emulate, ref, tables
class Event:
    def __init__(s, **k): pass
    def record(s): pass
    def query(s): return True
    def elapsed_time(s, e): return 1.0
class Graph:
    def replay(s): pass
@contextlib.contextmanager
def graph(g): yield
for k, v in dict(get_device_properties=lambda i: types.SimpleNamespace(multi_processor_count=int(sys.argv[2])), Event=Event, CUDAGraph=Graph, graph=graph, synchronize=lambda: None, get_device_name=lambda: "none").items(): setattr(torch.cuda, k, v)
class K:
    def __getitem__(s, g): return emulate.launch
sys.modules["kernel"] = types.SimpleNamespace(token_kernel=K())
text = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "run.py")).read().replace('"cuda"', '"cpu"').replace("2 ** 29", "2 ** 20")
text = text.replace("t = tables.Token(", "t = token(").replace("range(64)", "range(3)").replace("split=4", "split=3")
space = dict(__name__="x", __file__=__file__, token=lambda *a: tables.Token(*a, "cpu", emulate.Smem))
exec(compile(text, "run.py", "exec"), space)
threading.Thread(target=emulate.dma, daemon=True).start()
for n in sys.argv[1].split(","):
    print("check", n, space["check"](n, 2))
    space["timing"](n, 3, "row.2.4,packed.3.6,row.2.4.half,launches")

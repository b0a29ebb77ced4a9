"""run.py's own code on a CPU, with the emulator in place of the GPU."""
import contextlib, os, re, sys, threading, types
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch, emulate, ref
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
plain = ref.run
ref.run = lambda t, *a, **o: plain(t, *a, launch=emulate.launch, **o)
text = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "run.py")).read().replace('"cuda"', '"cpu"').replace("2 ** 29", "2 ** 20")
text = text.replace("ref.build(name, L,", 'ref.build(name, L, "cpu", together=True, ').replace("range(64)", "range(3)").replace("(2047, 0)", "(1100, 0)").replace("counter[0] = -1000000", "counter[0] = 0")
space = dict(__name__="x", __file__=__file__)
exec(compile(text, "run.py", "exec"), space)
threading.Thread(target=emulate.dma, daemon=True).start()
for n in sys.argv[1].split(","):
    print("check", n, space["check"](n, 2))
    space["timing"](n, 3, "fixed.1.2,fixed.2.3.nr8,fixed.1.2.bk64,float.1.2")

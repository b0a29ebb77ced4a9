"""kernel.py on a CPU: the same text with plain Python in place of Gluon, programs and their copying warps as threads."""
import os, random, re, sys, threading, time, types
import torch
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
torch.set_num_threads(1)
import ref
lock = threading.RLock(); cond = threading.Condition(lock)
local = threading.local()
T = torch.as_tensor
class Ptr:
    def __init__(s, m, o=0): s.m, s.o = m, o
    def __add__(s, x): return Ptr(s.m, s.o + x)
    @property
    def dtype(s): return types.SimpleNamespace(element_ty=s.m.dtype)
class Smem:
    def __init__(s, m): s.m = m; s.shape = list(m.shape); s.layout = None; s.dtype = m.dtype
    def slice(s, a, n, dim=0): return Smem(s.m.narrow(dim, a, n))
    def index(s, i): return Smem(s.m[int(i)])
    def load(s, layout): return s.m.clone()
    def store(s, v): s.m.copy_(v)
    def _reinterpret(s, dtype, shape, layout): return Smem(s.m.view(shape))
def at(p, mask):
    o = T(p.o)
    ok = torch.ones_like(o, dtype=torch.bool) if mask is None else torch.broadcast_to(T(mask), o.shape)
    bad = ok & ((o < 0) | (o >= p.m.numel()))
    assert not bad.any(), ("out of bounds", o[bad][:4], p.m.numel())
    return torch.where(ok, o, 0), ok
def load(p, mask=None, other=None, cache_modifier=None, volatile=False):
    o, ok = at(p, mask)
    v = p.m[o.long()].clone()
    return v if mask is None else torch.where(ok, v, T(other).to(v.dtype))
def store(p, v, mask=None):
    o, ok = at(p, mask)
    if o.dim() < T(v).dim(): o, ok = torch.broadcast_to(o, T(v).shape), torch.broadcast_to(ok, T(v).shape)
    v = torch.broadcast_to(T(v).to(p.m.dtype), o.shape)
    with lock: p.m[o[ok].long()] = v[ok]
def atomic_add(p, v, mask=None, sem=None, scope=None):
    with cond:
        o, ok = at(p, mask)
        old = p.m[o.long()].clone()
        p.m[o[ok].long()] += torch.broadcast_to(T(v).to(p.m.dtype), o.shape)[ok]
        cond.notify_all()
        return old
def atomic_max(p, v, mask=None, sem=None, scope=None):
    with lock:
        o, ok = at(p, mask)
        if bool(ok.all()): p.m[o.long()] = torch.maximum(p.m[o.long()], T(v).to(p.m.dtype))
def where(c, a, b): return torch.where(T(c), T(a), T(b))
class Jit:
    def __call__(s, f=None, **k): return f if f else (lambda f: f)
def asm(text, c, args, dtype=None, is_pure=None, pack=None):
    if "acquire" in text:
        with cond:
            while int(load(args[0])) < int(args[1]):
                if not cond.wait(30): return T(1)
    return T(0)
class Bar:
    def __init__(s): s.ph = s.tx = 0; s.pending = 1
    def check(s):
        if s.pending == 0 and s.tx == 0:
            s.ph += 1; s.pending = 1; cond.notify_all()
        assert s.pending >= 0 and s.tx >= 0
bars = {}
def bar(x):
    return bars[x.m.data_ptr()]
def wait(x, parity):
    b = bar(x)
    with cond:
        end = time.time() + 20
        while (b.ph & 1) == int(parity):
            cond.wait(1)
            if time.time() > end: raise SystemExit("mbarrier waits for ever")
def arrive(x, count=1):
    with cond: b = bar(x); b.pending -= 1; b.check()
def expect(x, n):
    with cond: b = bar(x); b.tx += n; b.pending -= 1; b.check()
def init(x, count):
    with lock: bars[x.m.data_ptr()] = Bar()
flying = []
flight = {"most": 0}
def copy(w, coords, b, dst):
    with cond: flying.append((w.m, int(coords[0]), int(coords[1]), b, dst)); flight["most"] = max(flight["most"], len(flying)); cond.notify_all()
def dma():
    while True:
        with cond:
            while not flying: cond.wait(1)
            w, r, c, b, dst = flying.pop(random.randrange(len(flying)))
            assert 0 <= r < w.shape[0] and 0 <= c < w.shape[1], ("tile outside", r, c, w.shape)
            out = torch.zeros(128, 128, dtype=w.dtype); part = w[r:r + 128, c:c + 128]; assert part.shape == out.shape
            out[:part.shape[0], :part.shape[1]] = part
            dst.m.copy_(out)
            x = bar(b); x.tx -= 32768; x.check()
def specialize(parts, warps, regs):
    ctx = local.pid
    def work(f, a):
        local.pid = ctx
        try: f(*a)
        except BaseException as e: fail(e)
    th = [threading.Thread(target=work, args=p, daemon=True) for p in parts[1:]]
    [t.start() for t in th]; parts[0][0](*parts[0][1]); [t.join() for t in th]
def fail(e):
    import traceback; traceback.print_exc(); sys.stdout.flush(); os._exit(1)
gl = types.SimpleNamespace(
    constexpr=lambda x: x, program_id=lambda i: local.pid, load=load, store=store, atomic_add=atomic_add, where=where,
    arange=lambda a, b, l=None: torch.arange(a, b), expand_dims=lambda x, d: x.unsqueeze(d), full=lambda s, v, d, l=None: torch.full(s, v, dtype=d),
    zeros=lambda s, d, l=None: torch.zeros(s, dtype=d), maximum=lambda a, b: torch.maximum(T(a), T(b)), minimum=lambda a, b: torch.minimum(T(a), T(b)),
    exp=torch.exp, exp2=torch.exp2, rsqrt=torch.rsqrt, sum=lambda x, a: x.sum(a), max=lambda x, a: x.max(a).values,
    permute=lambda x, d: x.permute(d), reshape=lambda x, s: x.reshape(s), convert_layout=lambda x, l, assert_trivial=False: x,
    broadcast=lambda a, b: torch.broadcast_tensors(a, b), inline_asm_elementwise=asm, static_range=range, num_warps=lambda: 8, atomic_max=atomic_max,
    allocate_shared_memory=lambda d, s, l: Smem(torch.full(s, float("nan")).to(d) if d.is_floating_point else torch.zeros(s, dtype=d)),
    warp_specialize=specialize, thread_barrier=lambda: None, bfloat16=torch.bfloat16, float32=torch.float32, int32=torch.int32, int64=torch.int64,
    BlockedLayout=lambda *a: a, SliceLayout=lambda *a: a, SwizzledSharedLayout=lambda *a: a, DistributedLinearLayout=lambda *a: a,
    NVMMADistributedLayout=lambda *a: a, DotOperandLayout=lambda *a: a)
def mma_v2(a, b, c): return c + a.float() @ b.float()
text = open(os.path.join(ref.root, "kernels/decode/token/triton.py")).read()
text = re.sub(r"^(from|import) .*$", "", text, flags=re.M)
text = re.sub(r"(\w+): gl\.constexpr = ", r"\1 = ", text)
space = dict(gl=gl, thread_barrier=lambda: None, copy_tile=copy, seen_as=lambda m, shape, layout: Smem(m.m.view(shape)), gluon=types.SimpleNamespace(jit=Jit()), mma_v2=mma_v2, fence_async_shared=lambda: None,
             mbarrier=types.SimpleNamespace(wait=wait, arrive=arrive, expect=expect, init=init, MBarrierLayout=lambda: None),
             tma=types.SimpleNamespace(async_copy_global_to_shared=copy))
exec(compile(text, "kernel.py", "exec"), space)
def launch(*args, **kw):
    kw = {}
    names = space["token_kernel"].__code__.co_varnames
    args = [Ptr(a.as_strided((a.untyped_storage().nbytes() // a.element_size(),), (1,), 0), a.storage_offset()) if isinstance(a, torch.Tensor) else a for a in args]
    def one(pid):
        local.pid = pid
        try: space["token_kernel"](*args, **kw)
        except BaseException as e: fail(e)
    th = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(args[names.index("programs")])]
    [t.start() for t in th]; [t.join() for t in th]
    assert not flying
    return types.SimpleNamespace(n_regs=0, n_spills=0, metadata=types.SimpleNamespace(shared=0))
class Memory:
    """A descriptor's view of the weights that lie together in one tensor."""
    def __init__(s, w, rows):
        K = w.stride(0)
        flat = w.as_strided((w.untyped_storage().nbytes() // 2,), (1,), 0)[w.storage_offset():]
        flat = torch.cat([flat, torch.full((rows * K + K - len(flat),), float("nan"), dtype=w.dtype)]) if len(flat) < rows * K + K else flat
        s.m = flat.as_strided((rows, 2 * K), (K, 1)); s.layout = None
import blr.kernels.decode.token.launch as launching
launching.describe = Memory
def main():
    threading.Thread(target=dma, daemon=True).start()
    for name, layers, programs, split, caps, fixed in (("s", 2, 5, 2, (1, 2), True), ("s-lr", 2, 7, 3, (1, 3), True), ("mini", 2, 24, 4, (2, 3), True), ("s-lr", 1, 9, 4, (2, 6), False), ("s-wide", 1, 37, 2, (6, 6), True)):
        m = ref.build(name, layers, "cpu", 64, split, programs, True, fixed=fixed)
        t, worst = m.t, []
        for pos, start in ((0, 0), (1, 0), (2, 1), (40, 3), (63, 0), (3, 3)):
            h = torch.randn(m.hidden)
            m.pos.fill_(pos); m.start.fill_(start); m.x.copy_(h)
            data = m.data.clone()
            want = ref.llama(m, h, data, pos, start)
            near = []
            if pos in (2, 40):
                for it in range(len(m.steps)):
                    if it == 0:
                        y = None
                    else: y = ref.phase(m, it)
                    ref.run(t, it, it + 1, *caps, launch=launch)
                    if y is not None: near.append(ref.error(ref.got(m, it), y))
                if max(near) > 1e-4: print([f"{m.names[(i + 1) % m.P]} {e:.1e}" for i, e in enumerate(near)])
            else:
                ref.run(t, 0, None, *caps, launch=launch, NR=random.choice((8, 16)))
            worst.append((pos, f"{ref.error(m.x, want):.1e}", f"{max(near, default=0):.1e}", f"{(data.float() - m.data.float()).abs().max():.1e}"))
        assert t.counter.sum() == 0 and t.state[1:].sum() == 0
        m.x.fill_(float("inf")); ref.run(t, 0, None, *caps, launch=launch, NR=random.choice((8, 16))); assert m.x.isnan().all() or not fixed, m.x
        print(name, layers, programs, split, caps, fixed, worst, "most in flight", flight["most"], flush=True)
if __name__ == "__main__":
    main()

"""Random models, their steps and their results in plain torch, for run.py and emulate.py."""
import os, sys, types
import tempfile
root, links = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")), tempfile.mkdtemp()
os.makedirs(links + "/blr")
for name in ("compressor", "kernels", "configs", "recipes"): os.symlink(f"{root}/{name}", f"{links}/blr/{name}")
os.symlink(f"{root}/scripts/bench", f"{links}/blr/bench")
sys.path.insert(0, links)  # this checkout's blr, whatever is installed
import torch
from blr.kernels.decode.token.launch import Attention, Token
from blr.kernels.decode.token.tables import GATE, NORM, PARTS, Product, Step
def run(t, first=0, last=None, before=1, after=2, launch=None, **shape):
    """As `Token.launch`, with other caps and another shape."""
    from blr.kernels.decode.token import launch as module
    n, programs, *rest = t.sizes
    o = {} if launch else dict(num_warps=8, launch_cooperative_grid=True)
    if launch is None:
        from blr.kernels.decode.token.triton import token_kernel
        launch = token_kernel[(programs,)]
    made = t.shape._replace(**shape)
    if "NR" in shape: made = made._replace(NX=module.CHUNKS // made.NR)
    return launch(*t.arguments, first, n if last is None else last, n, programs, *rest[:-2], before, after, *t.numbers, made, **o)
R7 = dict(q=1024, k=1024, v=1024, o=1024, gate=1488, up=1488, down=1488)
R8 = dict(q=1024, k=400, v=400, o=1024, gate=1584, up=1584, down=1584)
SHAPES = {  # hidden, ff, heads, kv_heads, width, ranks, vocabulary, bias and head norms
    "7b-lr": (4096, 11008, 32, 32, 128, R7, 32000, False),
    "7b": (4096, 11008, 32, 32, 128, None, 32000, False),
    "8b": (4096, 14336, 32, 8, 128, None, 128256, False),
    "8b-lr": (4096, 14336, 32, 8, 128, R8, 128256, False),
    "mini": (384, 1024, 6, 2, 64, None, 8192, True),
    "s-lr": (256, 384, 2, 1, 128, dict(q=144, k=128, v=160, o=192, gate=144, up=128, down=160), 100, True),
    "s": (256, 640, 2, 2, 128, None, 100, False),
    "s-wide": (256, 4480, 2, 1, 128, None, 100, False),
}
NAMES = ("q", "k", "v", "o", "gate", "up", "down")
def build(name, layers, device="cuda", context=2048, split=4, programs=132, together=False, dtype=torch.bfloat16, seed=1, **options):
    hidden, ff, heads, kv, D, ranks, vocab, extra = SHAPES[name]
    g = torch.Generator(device).manual_seed(seed)
    shape = dict(q=(heads * D, hidden), k=(kv * D, hidden), v=(kv * D, hidden), o=(hidden, heads * D), gate=(ff, hidden), up=(ff, hidden), down=(hidden, ff))
    want = []
    for l in range(layers):
        for n in NAMES:
            r, c = shape[n]
            want += [(l, "V" + n, ranks[n], c), (l, "U" + n, r, ranks[n])] if ranks else [(l, n, r, c)]
    big = {}
    if together:
        for _, _, r, c in want: big[c] = big.get(c, 0) + r
        big = {c: torch.empty(r, c, dtype=dtype, device=device) for c, r in big.items()}
        at = dict.fromkeys(big, 0)
    W = {}
    for l, n, r, c in want:
        if together:
            W[l, n] = big[c][at[c]:at[c] + r]; at[c] += r
        else:
            W[l, n] = torch.empty(r, c, dtype=dtype, device=device)
        W[l, n].normal_(generator=g).mul_(c ** -.5)
    size = 0
    def buffer(n):
        nonlocal size
        size += -(-n // 256) * 256
        return size - -(-n // 256) * 256
    h, qkv, gu = buffer(hidden), buffer((heads + 2 * kv) * D), buffer(2 * ff)
    parts, exps = 0, heads * split * D
    groups = [(("q", "k", "v"), h, 0, NORM, qkv, False), "attention", (("o",), parts, exps, PARTS, h, True), (("gate", "up"), h, 0, NORM, gu, False), (("down",), gu, gu + ff, GATE, h, True)]
    zs = {i: buffer(sum(-(-ranks[n] // 128) * 128 for n in gr[0])) for i, gr in enumerate(groups) if gr != "attention"} if ranks else {}
    steps, names = [], []
    for l in range(layers):
        for i, gr in enumerate(groups):
            if gr == "attention":
                steps.append(Step(l, parts, x=qkv, up=exps, gain=1 << 30, attention=True)); names.append("attention"); continue
            ns, x, up, flags, y, adds = gr
            gain, label = 2 * l + (ns[0] == "gate"), "-".join(ns)
            ys, zz = [y], []
            for n in ns: ys.append(ys[-1] + shape[n][0])
            if ranks:
                zz = [zs[i]]
                for n in ns: zz.append(zz[-1] + -(-ranks[n] // 128) * 128)
                steps.append(Step(l, zz[0], zz[-1] - zz[0], flags, gain, products=[Product(W[l, "V" + n], x, zz[j], up) for j, n in enumerate(ns)])); names.append("V " + label)
                steps.append(Step(l, y, 0 if adds else ys[-1] - y, products=[Product(W[l, "U" + n], zz[j], ys[j]) for j, n in enumerate(ns)])); names.append("U " + label)
            else:
                steps.append(Step(l, y, 0 if adds else ys[-1] - y, flags, gain, products=[Product(W[l, n], x, ys[j], up) for j, n in enumerate(ns)])); names.append(label)
    data = torch.zeros(layers, 2, 1, kv, context, D, dtype=dtype, device=device).normal_(generator=g)
    a = torch.outer(torch.arange(context, dtype=torch.float64), 10000.0 ** -(torch.arange(D // 2, dtype=torch.float64) / (D // 2)))
    cos, sin = (f(a).float().repeat(1, 2).to(device).contiguous() for f in (torch.cos, torch.sin))
    gains = torch.rand(2 * layers, hidden, device=device, generator=g) + .5
    bias = torch.randn(layers, (heads + 2 * kv) * D, device=device, generator=g) if extra else None
    head_gains = torch.rand(layers, 2, D, device=device, generator=g) + .5 if extra else None
    att = Attention(data[:, 0, 0], data[:, 1, 0], cos, sin, heads, D ** -.5, bias, head_gains, 1e-6)
    x, pos, start = torch.zeros(hidden, device=device), torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    make = lambda **o: Token(steps, x, gains, att, pos, start, 1e-5, size, split, programs, **o)
    t = make(**options)
    m = types.SimpleNamespace(make=make, name=name, layers=layers, hidden=hidden, ff=ff, heads=heads, kv=kv, D=D, ranks=ranks, vocab=vocab, W=W, x=x, pos=pos, start=start, data=data, cos=cos, sin=sin,
                              gains=gains, bias=bias, head_gains=head_gains, t=t, steps=steps, names=names[: len(names) // layers], P=len(names) // layers, h=h, split=split, parts=parts, exps=exps, context=context)
    return m

def rotate(m, x, pos):
    n = m.D // 2
    return x * m.cos[pos] + torch.cat([-x[..., n:], x[..., :n]], -1) * m.sin[pos]

def attention(m, qkv, data, pos, start, l):
    D = m.D
    if m.bias is not None: qkv = qkv + m.bias[l]
    q, k, v = (t.view(-1, D) for t in qkv.split([m.heads * D, m.kv * D, m.kv * D]))
    if m.head_gains is not None:
        q, k = (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * m.head_gains[l, i] for i, a in enumerate((q, k)))
    K, V = data[l, 0, 0], data[l, 1, 0]
    K[:, pos] = rotate(m, k, pos - start).to(K.dtype)
    V[:, pos] = v.to(V.dtype)
    q = rotate(m, q, pos - start)
    k, v = (t[:, start:pos + 1].float().repeat_interleave(m.heads // m.kv, 0) for t in (K, V))
    p = torch.softmax((k @ q.unsqueeze(-1)).squeeze(-1) * D ** -.5, -1)
    return (p.unsqueeze(1) @ v).squeeze(1).reshape(-1)

def llama(m, h, data, pos, start=0):
    """The residual stream behind all layers, in float32; written without the steps."""
    def product(name, x, l):
        for n in ("V" + name, "U" + name) if m.ranks else (name,):
            x = m.W[l, n].float() @ x
        return x
    norm = lambda x, g: x * torch.rsqrt(x.square().mean() + 1e-5) * g
    for l in range(m.layers):
        x = norm(h, m.gains[2 * l])
        h = h + product("o", attention(m, torch.cat([product(n, x, l) for n in "qkv"]), data, pos, start, l), l)
        x = norm(h, m.gains[2 * l + 1])
        h = h + product("down", torch.nn.functional.silu(product("gate", x, l)) * product("up", x, l), l)
    return h

def real(m): return m.t.sums.float() * 2.0 ** -32 if m.t.sums.dtype == torch.int64 else m.t.sums
def joined(m):
    n = m.heads * m.split
    a, e = m.t.arguments[9][:n * m.D].view(m.heads, m.split, m.D), m.t.arguments[9][m.exps:m.exps + 2 * n].view(m.heads, m.split, 2)
    w = torch.exp2(e[..., 0] - e[..., 0].max(1, keepdim=True).values)
    return ((w.unsqueeze(-1) * a).sum(1) / (w * e[..., 1]).sum(1, keepdim=True)).reshape(-1)

def phase(m, it):
    """What phase `it` makes of the sums as they are."""
    f, s = m.steps[it], real(m)
    if f.attention:
        return attention(m, s[f.x:f.x + (m.heads + 2 * m.kv) * m.D], m.data.clone(), int(m.pos), int(m.start), f.layer)
    lo = f.y; hi = max(p.y + len(p.w) for p in f.products)
    y = torch.zeros(hi - lo, device=s.device) if f.size else s[lo:hi].clone()
    for p in f.products:
        k = p.w.shape[1]
        x = joined(m) if f.flags & PARTS else s[p.x:p.x + k]
        if f.flags & NORM: x = x * torch.rsqrt(s[m.h:m.h + m.hidden].square().mean() + 1e-5) * m.gains[f.gain]
        if f.flags & GATE: x = torch.nn.functional.silu(x) * s[p.up:p.up + k]
        y[p.y - lo:p.y - lo + len(p.w)] += p.w.float() @ x
    return y

def got(m, it):
    f = m.steps[it]
    return joined(m) if f.attention else real(m)[f.y:max(p.y + len(p.w) for p in f.products)]

def error(a, b):
    e = ((a - b).norm() / b.norm()).item()
    return e if e == e else 9e9

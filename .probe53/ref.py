"""Random models and their results in plain torch, for run.py and emulate.py."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../kernels/decode/token"))
import torch
import tables

SHAPES = {  # hidden, ff, heads, kv_heads, ranks, vocabulary
    "7b-lr": (4096, 11008, 32, 32, dict(q=1024, k=1024, v=1024, o=1024, gate=1488, up=1488, down=1488), 32000),
    "7b": (4096, 11008, 32, 32, None, 32000),
    "8b": (4096, 14336, 32, 8, None, 128256),
    "8b-lr": (4096, 14336, 32, 8, dict(q=1024, k=400, v=400, o=1024, gate=1584, up=1584, down=1584), 128256),
    "s-lr": (256, 384, 2, 1, dict(q=80, k=48, v=64, o=96, gate=144, up=128, down=160), 100),
    "s-lr4": (256, 384, 2, 1, dict(q=80, k=80, v=80, o=80, gate=144, up=144, down=144), 100),
    "s": (256, 640, 2, 2, None, 100),
    "s-wide": (256, 4480, 2, 1, None, 100),
    "s-cut": (208, 336, 2, 1, dict(q=80, k=80, v=80, o=80, gate=80, up=80, down=80), 100),
}

def stores(plan, layers, device, seed=1):
    g = torch.Generator(device).manual_seed(seed)
    return {k: torch.randn(layers * rows, k, dtype=torch.bfloat16, device=device, generator=g).mul_(k ** -0.5) for k, rows in plan.stores.items()}

def weight(plan, W, name, l):
    k, first, rows = plan.matrices[name]
    return W[k][l * plan.stores[k] + first:][:rows]

def packed(plan, W, layers):
    """[layers * tiles * 64, 128]."""
    out, at = None, 0
    plan.table(True)
    out = torch.zeros(layers, plan.tiles, 64, 128, dtype=torch.bfloat16, device=next(iter(W.values())).device)
    for f in plan.phases:
        for p in f.pieces:
            if f.attention:
                continue
            rb, kb = tables.ceil(p.rows, 64), tables.ceil(p.columns, 128)
            for l in range(layers):
                full = torch.zeros(rb * 64, kb * 128, dtype=torch.bfloat16, device=out.device)
                full[:p.rows, :p.columns] = W[p.store][l * plan.stores[p.store] + p.row:][:p.rows, p.column:p.column + p.columns]
                out[l, at:at + rb * kb] = full.view(rb, 64, kb, 128).permute(0, 2, 1, 3).reshape(rb * kb, 64, 128)
            at += rb * kb
    return {128: out.view(-1, 128)}

def rope_table(context, device):
    a = torch.outer(torch.arange(context, dtype=torch.float64), 10000.0 ** -(torch.arange(64, dtype=torch.float64) / 64))
    return torch.cat([a.cos(), a.sin()], 1).float().to(device).contiguous()

def rotate(x, rope, pos):
    c, s = rope[pos, :64].repeat(2), rope[pos, 64:].repeat(2)
    return x * c + torch.cat([-x[..., 64:], x[..., :64]], -1) * s

def attention(q, k, v, keys, values, rope, pos, l, plan, context):
    """keys, values: the cache, written."""
    K, V = (t.view(-1, plan.kv_heads, context, 128)[l] for t in (keys, values))
    K[:, pos] = rotate(k.view(plan.kv_heads, 128), rope, pos).bfloat16()
    V[:, pos] = v.view(plan.kv_heads, 128).bfloat16()
    n = plan.heads // plan.kv_heads
    q = rotate(q.view(plan.heads, 128), rope, pos)
    k, v = (t[:, :pos + 1].float().repeat_interleave(n, 0) for t in (K, V))
    p = torch.softmax((k @ q.unsqueeze(-1)).squeeze(-1) * 128 ** -0.5, -1)
    return (p.unsqueeze(1) @ v).squeeze(1).reshape(-1)

def llama(plan, W, gains, rope, h, keys, values, pos, layers, context):
    """The residual stream behind all layers, in float32; written without the plan's phases."""
    def product(name, x, l):
        for n in ("V" + name, "U" + name) if plan.ranks else (name,):
            x = weight(plan, W, n, l).float() @ x
        return x
    norm = lambda x, g: x * torch.rsqrt(x.square().mean() + 1e-5) * g
    g = gains.view(layers, 2, -1)
    for l in range(layers):
        x = norm(h, g[l, 0])
        q, k, v = (product(n, x, l) for n in "qkv")
        h = h + product("o", attention(q, k, v, keys, values, rope, pos, l, plan, context), l)
        x = norm(h, g[l, 1])
        h = h + product("down", torch.nn.functional.silu(product("gate", x, l)) * product("up", x, l), l)
    return h

def phase(t, W, it):
    """What phase `it` makes of t.act as it is: (offset, numbers)."""
    p, l = t.plan, it // len(t.plan.phases)
    f, pos, act = p.phases[it % len(p.phases)], int(t.position), t.act
    take = lambda at, n: act[at:at + n]
    if f.attention:
        q, k, v = take(f.pieces[0].x, (p.heads + 2 * p.kv_heads) * 128).split([p.heads * 128, p.kv_heads * 128, p.kv_heads * 128])
        return f.y, attention(q, k, v, t.keys.clone(), t.values.clone(), t.rope, pos, l, p, t.context)
    y = take(f.y, f.size).clone() if f.adds else torch.zeros(f.size, device=act.device)
    for s in f.pieces:
        if f.flags & 4:
            x = joined(t, s.x, s.up)
        else:
            x = take(s.x, s.columns)
        if f.flags & 1:
            whole = take(p.h, p.hidden)
            x = x * torch.rsqrt(whole.square().mean() + 1e-5) * t.gains.view(-1, 2, p.hidden)[l, f.gain, s.column:s.column + s.columns]
        if f.flags & 2:
            x = torch.nn.functional.silu(x) * take(s.up, s.columns)
        y[s.y - f.y:][:s.rows] += W[s.store][l * p.stores[s.store] + s.row:][:s.rows, s.column:s.column + s.columns].float() @ x
    return f.y, y

def joined(t, at, sums):
    p = t.plan
    n = p.heads * p.split
    a, m = t.act[at:at + n * 128].view(p.heads, p.split, 128), t.act[sums:sums + 2 * n].view(p.heads, p.split, 2)
    w = torch.exp2(m[..., 0] - m[..., 0].max(1, keepdim=True).values)
    return ((w.unsqueeze(-1) * a).sum(1) / (w * m[..., 1]).sum(1, keepdim=True)).reshape(-1)

def got(t, it):
    f = t.plan.phases[it % len(t.plan.phases)]
    return joined(t, f.pieces[0].y, f.pieces[0].up) if f.attention else t.act[f.y:f.y + f.size]

def error(a, b):
    e = ((a - b).norm() / b.norm()).item()
    return e if e == e else 9e9

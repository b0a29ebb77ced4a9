"""Whole token in one kernel (issue 53): right, then timed. Each case in a process of its own."""
import argparse, os, statistics, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
LIMIT = 45
say = lambda *a: print(*a, flush=True)


def setup(name, L, **o):
    import torch, ref
    torch.manual_seed(0)
    return ref.build(name, L, programs=torch.cuda.get_device_properties(0).multi_processor_count, **o)


def go(t, first=0, last=None, limit=8.0, **o):
    """One launch, watched."""
    import torch, ref
    k = ref.run(t, first, last, **o)
    e = torch.cuda.Event()
    e.record()
    end = time.time() + limit
    while not e.query():
        if time.time() > end:
            with torch.cuda.stream(torch.cuda.Stream()):
                say(f"HANGS in phases {first}..{last}: counter {t.counter[[0, 32]].tolist()} of {t.sizes[1]} programs, state {t.state[:6].tolist()}")
            os._exit(3)
        time.sleep(.0005)
    s = t.state.cpu()
    if int((s[1:] != 0).sum()):
        say(f"GAVE UP waiting: {int((s[2:] != 0).sum())} programs, flag {int(s[1])}, before step {t.lost()}")
    return k


def check(name, L=2):
    import torch, ref
    m = setup(name, L)
    t, wrong, t0 = m.t, 0, time.time()
    m.pos.fill_(37); m.x.normal_()
    k = go(t, 0, 1, limit=25)
    say(f"{name}: {k.n_regs} registers, {k.n_spills} spills, {k.metadata.shared} B shared; first launch (compiled) {time.time() - t0:.1f} s")
    es = []
    for it in range(len(m.steps)):
        if it == 0:
            t.sums[m.h:m.h + m.hidden] = (m.x.double() * 2 ** 32).long()
        y = ref.phase(m, it)
        go(t, it, it + 1)
        g = ref.got(m, it)
        es.append(ref.error(g, y))
        if es[-1] > 1e-4:
            rows = ((g - y).abs() > 1e-3 * y.abs().max()).nonzero().flatten().tolist()
            say(f"WRONG {name}: first wrong phase {it} = {m.names[it % m.P]} of layer {it // m.P}: {es[-1]:.1e}; {len(rows)} of {y.numel()} rows, {rows[:6]}..{rows[-3:]}; has {g[rows[:4]].tolist()} wants {y[rows[:4]].tolist()}")
            return 1
    say(f"phases {name}: right, worst {max(es):.1e}: " + " ".join(f"{m.names[i]} {es[i]:.0e}" for i in range(m.P)))
    out = []
    for options in (dict(), dict(NR=8), dict(BK=64)):
        for pos, start in ((0, 0), (5, 2), (127, 0), (1000, 700), (2047, 0)):
            h = torch.randn(m.hidden, device="cuda")
            data = m.data.clone()
            want = ref.llama(m, h, data, pos, start)
            m.pos.fill_(pos); m.start.fill_(start)
            got = []
            for _ in range(2):
                m.x.copy_(h)
                go(t, **options)
                got.append(m.x.clone())
            e, again = ref.error(got[0], want), bool((got[0] == got[1]).all())
            out.append(f"{pos}: {e:.0e} (cache {(data.float() - m.data.float()).abs().max():.0e}){'' if again else ' NOT THE SAME AGAIN'}")
            wrong |= e > 2e-3 or not again
    say(f"{'WRONG' if wrong else 'whole'} {name}, {L} layers: " + "; ".join(out))
    data, es = m.data.clone(), []
    for i in range(64):
        h = torch.randn(m.hidden, device="cuda")
        m.x.copy_(h); m.pos.fill_(90 + i); m.start.fill_(0)
        go(t)
        es.append(ref.error(m.x, ref.llama(m, h, data, 90 + i)))
    say(f"{'WRONG' if max(es) > 2e-3 else 'steps'} {name}: 64 tokens from 90 on, error median {statistics.median(es):.1e} worst {max(es):.1e}")
    t.state[0] = 1; t.counter[0] = -1000000
    say("waiting in vain (expected to give up):"); t0 = time.time()
    go(t); say(f"x all nan: {bool(m.x.isnan().all())}; {time.time() - t0:.2f} s")
    m.x.copy_(h); go(t); again = m.x.clone(); m.x.copy_(h); go(t)
    say(f"then right again: {bool((again == m.x).all() & m.x.isfinite().all())}")
    return wrong


def copy_speed():
    import torch
    a = torch.randint(0, 2 ** 30, (2 ** 29,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    ts = []
    for _ in range(12):
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        s.record(); b.copy_(a); e.record(); torch.cuda.synchronize()
        ts.append(s.elapsed_time(e))
    return 2 * a.nbytes / statistics.median(ts) * 1e3


def timed(g):
    import torch
    g.replay()
    s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    s.record()
    for _ in range(4):
        g.replay()
    e.record(); torch.cuda.synchronize()
    return s.elapsed_time(e) * 250


def timing(name, L=32, arms=""):
    import torch, ref
    speed = copy_speed()
    m = setup(name, L)
    ts = {"fixed": m.t}
    total = sum(w.nbytes for w in m.W.values())
    x = torch.randn(m.hidden, device="cuda")
    graphs, errors, times = {}, {}, {}
    want = None
    for arm in arms.split(","):
        kind, before, after, *rest = arm.split(".")
        if kind not in ts:
            ts[kind] = m.make(fixed=False)
        t, o = ts[kind], dict(before=int(before), after=int(after))
        o |= dict(NR=8 if "nr8" in rest else 16, BK=64 if "bk64" in rest else 32)
        m.pos.fill_(127); m.x.copy_(x)
        go(t, **o)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            m.x.copy_(x)
            ref.run(t, **o)
        g.replay(); torch.cuda.synchronize()
        want = ref.llama(m, x, m.data.clone(), 127) if want is None else want
        graphs[arm], errors[arm], times[arm] = g, ref.error(m.x, want), []
    for _ in range(7):
        for a, g in graphs.items():
            times[a].append(timed(g))
    med = {a: statistics.median(v) for a, v in times.items()}
    floor, head, n = total / speed * 1e6, m.vocab * m.hidden * 2 / speed * 1e6, len(m.steps)
    say(f"{name}: {torch.cuda.get_device_name()}, copy {speed / 1e12:.3f} TB/s, {total / 1e9:.3f} GB, {L} layers of {m.P} phases, position 127; floor {floor:.0f} us, head at copy speed {head:.0f} us; state {[int((t.state[1:] != 0).sum()) for t in ts.values()]}")
    say("| arm | us | least | of copy | us a phase over floor | tokens/s with head at copy speed | error | at 0, 511, 2047 |")
    for a in sorted(med, key=med.get):
        at = []
        for pos in (0, 511, 2047):
            m.pos.fill_(pos); at.append(f"{timed(graphs[a]):.0f}")
        m.pos.fill_(127)
        say(f"| {a} | {med[a]:.0f} | {min(times[a]):.0f} | {floor / med[a]:.1%} | {(med[a] - floor) / n:.2f} | {1e6 / (med[a] + head):.0f} | {errors[a]:.1e} | {', '.join(at)} |")
    best = min((a for a in med if a.startswith("fixed")), key=med.get)
    t = m.t
    _, before, after, *rest = best.split(".")
    t.arguments[-1] = torch.zeros(n * t.sizes[1] * 4, dtype=torch.int32, device="cuda")
    s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        m.x.copy_(x); s.record()
        ref.run(t, before=int(before), after=int(after), CLOCK=True, NR=8 if "nr8" in rest else 16); e.record()
    torch.cuda.synchronize()
    us, P = s.elapsed_time(e) * 1e3, m.P
    c = t.arguments[-1].view(L, P, t.sizes[1], 4).long().cpu()
    d = lambda a, b: (b - a) % 2 ** 32
    ghz = d(c[0, 0, :, 0], c[-1, -1, :, 3]).double().mean().item() / us / 1e3
    tiles = t.arguments[6][1:, :, 0].view(L, P, -1)[1].cpu()
    say(f"clocks of {best}, {us:.0f} us, {ghz:.2f} GHz; us, mean (largest): waits | stages | multiplies (floor) | a tile of 32 KiB | to the next")
    flat, sums = c.view(L * P, t.sizes[1], 4), [0.0] * 4
    for p in range(P):
        r = c[1:, p]
        nxt = torch.stack([flat[min(l * P + p + 1, L * P - 1), :, 0] for l in range(1, L)])
        v = [d(r[..., 0], r[..., 1]), d(r[..., 1], r[..., 2]), d(r[..., 2], r[..., 3]), d(r[..., 3], nxt)[:-1]]
        v = [q.double() / ghz / 1e3 for q in v]
        sums = [a + q.mean().item() for a, q in zip(sums, v)]
        s4 = [f"{q.mean():.2f} ({q.max(-1).values.median():.2f})" for q in v]
        size = sum(p.w.nbytes for p in m.steps[P + p].products)
        say(f"  {m.names[p]:10s} {s4[0]} | {s4[1]} | {s4[2]} ({size / speed * 1e6:.2f}) | {v[2].mean() / max(tiles[p].double().mean().item(), 1):.3f} | {s4[3]}")
    say(f"  a layer    {sums[0]:.2f} | {sums[1]:.2f} | {sums[2]:.2f} floor {floor / L:.2f} | | {sums[3]:.2f}")
    return 0


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--child")
    a.add_argument("--cases", default="check:7b-lr,timing:7b-lr:fixed.1.2/fixed.1.1/fixed.1.2.nr8/float.1.2/float.1.1/float.1.2.nr8,check:8b,timing:8b:fixed.1.2/fixed.1.1/float.1.2,check:mini")
    a.add_argument("--budget", type=float, default=75)
    a = a.parse_args()
    if a.child:
        what, name, *arms = a.child.split(":")
        t0 = time.time()
        rc = check(name) if what == "check" else timing(name, 32, arms[0].replace("/", ","))
        say(f"({what} {name}: {time.time() - t0:.0f} s)")
        sys.exit(rc)
    t0 = time.time()

    def child(case):
        left = min(LIMIT, a.budget - (time.time() - t0))
        if left < 4:
            say(f"{case}: no time left"); return 9
        p = subprocess.Popen([sys.executable, "-u", os.path.abspath(__file__), "--child", case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = p.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            p.kill(); out, err = p.communicate(); out += f"\n{case}: KILLED after {left:.0f} s\n"
        say(f"== {case} rc {p.returncode} at {time.time() - t0:.0f} s\n" + out.strip()[-4500:])
        if p.returncode:
            say("stderr: ..." + err.strip()[-1200:])
        return p.returncode

    cases = a.cases.split(",")
    if child(cases[0]):
        return say(f"all {time.time() - t0:.0f} s: nothing timed")
    for case in cases[1:]:
        child(case)
    say(f"all {time.time() - t0:.0f} s")


if __name__ == "__main__":
    main()

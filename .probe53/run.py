"""Whole token in one kernel (issue 53): right, then timed. `python3 .probe53/run.py`; each case in a process of 40 s at most."""
import argparse, os, statistics, subprocess, sys, time
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
CONTEXT, LIMIT = 2048, 40
say = lambda *a: print(*a, flush=True)


def setup(name, layers, ways=("row",), ring=12, split=4):
    import torch, ref, tables
    hidden, ff, heads, kv, ranks, _ = ref.SHAPES[name]
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    plan = tables.Plan(hidden, ff, heads, kv, ranks, programs, split)
    W = ref.stores(plan, layers, "cuda")
    g = torch.Generator("cuda").manual_seed(5)
    gains = torch.rand(layers * 2 * hidden, device="cuda", generator=g) + .5
    rope = ref.rope_table(CONTEXT, "cuda")
    made = {}
    for way in ways:
        t = tables.Token(plan, ref.packed(plan, W, layers) if way == "packed" else W, layers, gains, rope, CONTEXT, way == "packed", ring)
        t.keys.normal_(generator=g)
        t.values.normal_(generator=g)
        made[way] = t
    return plan, W, made


COOP = dict(num_warps=4, launch_cooperative_grid=True)


def go(t, first=0, last=None, limit=8.0, **o):
    """One launch, watched: marks of where all programs are if it does not end."""
    import torch, kernel
    k = t.run(kernel.token_kernel[(t.plan.programs,)], first, last, **o, **COOP)
    e = torch.cuda.Event()
    e.record()
    end = time.time() + limit
    while not e.query():
        if time.time() > end:
            m = t.marks.view(-1, 4)
            P = len(t.plan.phases)
            say(f"HANGS in phases {first}..{last}; consumers at (phase, 1 waits for programs, 2 stages, 3 multiplies, 4 arrived):",
                {f"{v // 8}/{v % 8}": int((m[:, 0] == v).sum()) for v in m[:, 0].unique().tolist()},
                "copies at (phase, tile):", {f"{v // 4096}/{v % 4096}": int((m[:, 1] == v).sum()) for v in m[:, 1].unique().tolist()})
            os._exit(3)
        time.sleep(.001)
    s = t.state.cpu()
    if int((s[1:] != 0).sum()):
        bad = s[1:].nonzero().flatten().tolist()
        say(f"GAVE UP waiting: {len(bad)} programs, of them {[(b, 'before phase', int(s[1 + b]) - 1) for b in bad[:4]]}")
        t.state[1:] = 0
        t.state[0] = 1 << 20
        t.counter.zero_()
    return k


def check(name, L=2):
    import torch, ref
    torch.manual_seed(0)
    plan, W, made = setup(name, L, ("row", "packed"))
    P = len(plan.phases)
    t = made["row"]
    t0 = time.time()
    k = go(t, 0, 1, mark=True, limit=25)
    say(f"{name}: {k.n_regs} registers, {k.n_spills} spills, {k.metadata.shared} B shared; first launch (compiled) {time.time() - t0:.1f} s")
    wrong = 0
    for way, t in made.items():
        t.act.zero_()
        t.position.fill_(37)
        t.h().copy_(torch.randn(plan.hidden, device="cuda"))
        es = []
        for it in range(t.steps):
            at, y = ref.phase(t, W, it)
            go(t, it, it + 1, mark=True)
            es.append(ref.error(ref.got(t, it), y))
            if es[-1] > 1e-4:
                g = ref.got(t, it)
                rows = ((g - y).abs() > 1e-3 * y.abs().max()).nonzero().flatten().tolist()
                say(f"WRONG {name} {way}: first wrong phase {it} = {plan.phases[it % P].name} of layer {it // P}: {es[-1]:.1e}; {len(rows)} of {y.numel()} rows, "
                    f"{rows[:6]}..{rows[-3:]}; has {g[rows[:4]].tolist()} wants {y[rows[:4]].tolist()}")
                wrong = 1
                break
        else:
            say(f"phases {name} {way}: right, worst {max(es):.1e}: " + " ".join(f"{plan.phases[i].name} {es[i]:.0e}" for i in range(P)))
    if wrong:
        return 1
    for way, t in made.items():  # whole launches
        out = []
        for pos in (0, 5, 127, 1000):
            h = torch.randn(plan.hidden, device="cuda")
            K, V = t.keys.clone(), t.values.clone()
            want = ref.llama(plan, W, t.gains, t.rope, h, K, V, pos, L, CONTEXT)
            t.position.fill_(pos)
            got = []
            for mark in (True, False):
                t.h().copy_(h)
                go(t, mark=mark)
                got.append(t.h().clone())
            out.append(f"{pos}: {ref.error(got[0], want):.1e} (cache {(K.float() - t.keys.float()).abs().max():.0e}), again {ref.error(got[1], got[0]):.0e}")
            wrong |= ref.error(got[0], want) > 2e-3 or ref.error(got[1], got[0]) > 1e-3
        say(f"{'WRONG' if wrong else 'whole'} {name} {way}, {L} layers, float32's error at position " + "; ".join(out))
    t = made["row"]
    K, V = t.keys.clone(), t.values.clone()
    t.position.fill_(90)
    es = []
    for i in range(64):
        h = torch.randn(plan.hidden, device="cuda")
        t.h().copy_(h)
        go(t)
        es.append(ref.error(t.h(), ref.llama(plan, W, t.gains, t.rope, h, K, V, 90 + i, L, CONTEXT)))
        t.position.add_(1)
    say(f"{'WRONG' if max(es) > 2e-3 else 'steps'} {name}: 64 tokens from 90 on, error median {statistics.median(es):.1e} worst {max(es):.1e}")
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


def timing(name, L=32, arms="row.2.4,row.3.6,row.4.8,row.12.12,packed.2.4,packed.3.6,row.2.4.half,launches"):
    import torch, ref, kernel
    torch.manual_seed(0)
    arms = arms.split(",")
    speed = copy_speed()
    plan, W, made = setup(name, L, ("row", "packed") if any("packed" in a for a in arms) else ("row",))
    P, vocabulary = len(plan.phases), ref.SHAPES[name][5]
    x = torch.randn(plan.hidden, device="cuda")
    total = sum(k * r * 2 for k, r in plan.stores.items()) * L
    graphs, errors = {}, {}
    for arm in arms:
        if arm == "launches":
            way, rest = "row", []
            calls = [dict(first=i, last=i + 1) for i in range(L * P)]
        else:
            way, before, after, *rest = arm.split(".")
            calls = [dict(before=int(before), after=int(after), both="half" not in rest)]
        t = made[way]
        t.position.fill_(127)
        t.h().copy_(x)
        for c in calls[:1]:
            go(t, **c)  # compiles
        if arm == "launches":
            t.act.zero_()
        global COOP
        for coop in (True, False):
            COOP = dict(num_warps=4, launch_cooperative_grid=True) if coop else dict(num_warps=4)
            try:
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g):
                    t.h().copy_(x)
                    for c in calls:
                        t.run(kernel.token_kernel[(plan.programs,)], **c, **COOP)
                break
            except Exception as e:
                say(f"no graph of {'cooperative' if coop else 'plain'} launches: {str(e)[:200]}")
                torch.cuda.synchronize()
        graphs[arm] = g
        K, V = t.keys.clone(), t.values.clone()
        g.replay()
        torch.cuda.synchronize()
        errors[arm] = ref.error(t.h(), ref.llama(plan, W, t.gains, t.rope, x, K, V, 127, L, CONTEXT))
    ts = {a: [] for a in arms}
    for _ in range(9):
        for a, g in graphs.items():
            g.replay()
            s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            s.record()
            for _ in range(4):
                g.replay()
            e.record(); torch.cuda.synchronize()
            ts[a].append(s.elapsed_time(e) * 250)
    gave = {w: int((t.state[1:] != 0).sum()) for w, t in made.items()}
    floor, head = total / speed * 1e6, vocabulary * plan.hidden * 2 / speed * 1e6
    say(f"{name}: {torch.cuda.get_device_name()}, copy {speed / 1e12:.3f} TB/s, {total / 1e9:.3f} GB, {L} layers of {P} phases, position 127; floor {floor:.0f} us, head at copy speed {head:.0f} us; gave up {gave}")
    say("| arm | us | least | of copy | us a phase over floor | tokens/s without head; with head at copy speed | error at the end |")
    for a in sorted(arms, key=lambda a: statistics.median(ts[a])):
        m = statistics.median(ts[a])
        say(f"| {a} | {m:.0f} | {min(ts[a]):.0f} | {floor / m:.1%} | {(m - floor) / L / P:.2f} | {1e6 / m:.0f}; {1e6 / (m + head):.0f} | {errors[a]:.1e} |")
    best = min((a for a in arms if a.startswith("row") and "half" not in a), key=lambda a: statistics.median(ts[a]))
    t = made["row"]
    for pos in (0, 511, 2047):
        t.position.fill_(pos)
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graphs[best].replay()
        s.record()
        for _ in range(4):
            graphs[best].replay()
        e.record(); torch.cuda.synchronize()
        say(f"{best} at position {pos}: {s.elapsed_time(e) * 250:.0f} us")
    t.position.fill_(127)
    s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        t.h().copy_(x)
        s.record(); go_fast(t, clock=True); e.record()
    torch.cuda.synchronize()
    us = s.elapsed_time(e) * 1e3
    c = t.clocks.view(L, P, plan.programs, 4).long().cpu()
    d = lambda a, b: (b - a) % 2 ** 32
    ghz = d(c[0, 0, :, 0], c[-1, -1, :, 3]).double().mean().item() / us / 1e3
    n = t.table[:, :, 0].cpu()
    say(f"clocks of {us:.0f} us launch ({ghz:.2f} GHz if it began at once); us, mean over programs and layers 1.. (largest of a program): waits | stages | multiplies (floor) | a tile | to the next")
    flat = c.view(L * P, plan.programs, 4)
    sums = [0.0] * 4
    for p in range(P):
        r = c[1:, p]
        nxt = torch.stack([flat[min(l * P + p + 1, L * P - 1), :, 0] for l in range(1, L)])
        parts = [d(r[..., 0], r[..., 1]), d(r[..., 1], r[..., 2]), d(r[..., 2], r[..., 3]), d(r[..., 3], nxt)[:-1]]
        parts = [v.double() / ghz / 1e3 for v in parts]
        for i in range(4):
            sums[i] += parts[i].mean().item()
        mean = [f"{v.mean():.2f} ({v.max(-1).values.median():.2f})" for v in parts]
        say(f"  {plan.phases[p].name:10s} {mean[0]} | {mean[1]} | {mean[2]} floor {n[p].sum().item() * 16384 / speed * 1e6:.2f} | {(parts[2].mean() / max(n[p].double().mean().item(), 1)):.3f} | {mean[3]}")
    say(f"  a layer    {sums[0]:.2f} | {sums[1]:.2f} | {sums[2]:.2f} floor {floor / L:.2f} | | {sums[3]:.2f}")
    return 0


def go_fast(t, **o):
    import kernel
    t.run(kernel.token_kernel[(t.plan.programs,)], **o, **COOP)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--child")
    a.add_argument("--cases", default="check:7b-lr,check:8b,timing:7b-lr,timing:8b")
    a.add_argument("--arms", default="")
    a.add_argument("--layers", type=int, default=0)
    a = a.parse_args()
    if a.child:
        what, name = a.child.split(":")
        o = {**({"arms": a.arms} if a.arms and what == "timing" else {}), **({"L": a.layers} if a.layers else {})}
        t0 = time.time()
        rc = (check if what == "check" else timing)(name, **o)
        say(f"({a.child}: {time.time() - t0:.0f} s)")
        sys.exit(rc)
    t0, bad = time.time(), set()
    for case in a.cases.split(","):
        name = case.split(":")[1]
        if case.startswith("timing") and name in bad:
            say(f"{case}: not run, its check did not end")
            continue
        cmd = [sys.executable, "-u", os.path.abspath(__file__), "--child", case, "--arms", a.arms, "--layers", str(a.layers)]
        p = subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = p.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            p.kill()
            out, err = p.communicate()
            out += f"\n{case}: KILLED after {LIMIT} s\n"
        say(f"== {case} rc {p.returncode} at {time.time() - t0:.0f} s\n" + out.strip()[-6000:])
        if p.returncode:
            say("stderr: ..." + err.strip()[-1500:])
            if case.startswith("check") and p.returncode != 1:
                bad.add(name)
    say(f"all {time.time() - t0:.0f} s")


if __name__ == "__main__":
    main()

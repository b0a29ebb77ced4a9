import os, re, subprocess, sys, tempfile, time
here = os.path.dirname(os.path.abspath(__file__))
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
import blr.kernels.decode.token.triton as K
def build(**c):
    k = K.token_kernel
    ty = c.pop("TYPE", "bf16")
    fixed = c.pop("FIXED", True)
    desc = f"tensordesc<{ty}[128, 128],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    types = {**{f"w{i}": desc for i in range(6)}, **{n: "*i32" for n in "table counter state clocks".split()}, **{n: "*fp32" for n in "x parts gains bias head_gains cos sin".split()},
             **{n: "*i64" for n in "position starts".split()}, "sums": "*i64" if fixed else "*fp32", "keys": "*" + ty, "values": "*" + ty,
             **{n: "fp32" for n in "scale eps head_eps".split()},
             **{n: "i32" for n in "first last steps programs context stride heads kv_heads before after".split()}}
    from blr.kernels.decode.token.launch import Shape
    nr = c.get("NR", 16)
    c = dict(T=Shape(**dict(dict(NS=6, NX=32 // nr, NR=16, HIDDEN=4096, WIDE=4096, D=128, SPLIT=4, BK=32, BIAS=False, NORMED=False, CLOCK=False), **c)))
    sig = {n: types.get(n, "constexpr") for n in k.arg_names}
    src = GluonASTSource(k, signature=sig, constexprs=c, attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(k.arg_names) if sig[n][0] == "*"})
    t = time.time()
    try:
        done = triton.compile(src, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, launch_cooperative_grid=True))
    except Exception as e:
        while e:
            print(str(e)[:1500]); print('--'); e = e.__cause__
        raise SystemExit(1)
    tools = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(done.asm["cubin"]); f.flush()
        use = subprocess.run([os.path.join(tools, "cuobjdump"), "-res-usage", f.name], capture_output=True, text=True).stdout
        sass = subprocess.run([os.path.join(tools, "nvdisasm"), "-c", f.name], capture_output=True, text=True).stdout
    print(c, ty, fixed, re.findall(r"REG:\d+ STACK:\d+", use), "shared", done.metadata.shared, "warps", done.metadata.num_warps, f"{time.time()-t:.1f} s", "LDL", sass.count("LDL"), "STL", sass.count("STL"), "lines", sass.count("\n"), flush=True)
    return done, sass
if __name__ == "__main__":
    args = dict(a.split("=") for a in sys.argv[1:])
    done, sass = build(**{k: eval(v) if k != "TYPE" else v for k, v in args.items()})
    o = os.environ.get("OUTD", "/dev/shm/h53/asm"); os.makedirs(o, exist_ok=True)
    for n in ("source", "ttgir", "ptx", "llir"):
        if n in done.asm: open(f"{o}/k.{n}", "w").write(done.asm[n])
    open(f"{o}/k.sass", "w").write(sass)

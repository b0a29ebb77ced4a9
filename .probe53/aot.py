import importlib.util, os, re, subprocess, sys, tempfile, time
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "../kernels/decode/token"))
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
import kernel as K
def build(**c):
    k = K.token_kernel
    desc = f"tensordesc<bf16[64, 128],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    types = dict(w0=desc, w1=desc, w2=desc, w3=desc, table="*i32", act="*fp32", gains="*fp32", keys="*bf16", values="*bf16", rope="*fp32",
                 position="*i32", counter="*i32", state="*i32", marks="*i32", clocks="*i32", scale="fp32", eps="fp32",
                 **{n: "i32" for n in "first last phases programs context heads kv_heads before after".split()})
    c = dict(dict(NS=12, NX=2, HIDDEN=4096, WIDE=4096, SPLIT=4, BK=32, BOTH=True, MARK=False, CLOCK=False), **c)
    sig = {n: types.get(n, "constexpr") for n in k.arg_names}
    src = GluonASTSource(k, signature=sig, constexprs=c, attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(k.arg_names) if sig[n][0] == "*"})
    t = time.time()
    try:
        done = triton.compile(src, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, launch_cooperative_grid=True))
    except Exception as e:
        while e:
            print(str(e)[:1500]); print('--'); e = e.__cause__
        raise SystemExit(1)
    tools = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(done.asm["cubin"]); f.flush()
        use = subprocess.run([os.path.join(tools, "cuobjdump"), "-res-usage", f.name], capture_output=True, text=True).stdout
        sass = subprocess.run([os.path.join(tools, "nvdisasm"), "-c", f.name], capture_output=True, text=True).stdout
    print(c, re.findall(r"REG:\d+ STACK:\d+", use), "shared", done.metadata.shared, "warps", done.metadata.num_warps, f"{time.time()-t:.1f} s", "LDL", sass.count("LDL"), "STL", sass.count("STL"))
    return done, sass
if __name__ == "__main__":
    args = dict(a.split("=") for a in sys.argv[1:])
    done, sass = build(**{k: eval(v) for k, v in args.items()})
    o = os.environ.get("OUTD", "/dev/shm/h3/asm"); os.makedirs(o, exist_ok=True)
    for n in ("source", "ttgir", "ptx", "llir"):
        if n in done.asm: open(f"{o}/k.{n}", "w").write(done.asm[n])
    open(f"{o}/k.sass", "w").write(sass)

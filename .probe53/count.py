"""Instructions of the compiled kernel by line of its text, and by function."""
import os, re, subprocess, sys, tempfile, collections
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import aot, triton
args = {k: eval(v) for k, v in (a.split("=") for a in sys.argv[1:])}
done, sass = aot.build(**args)
tools = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
    f.write(done.asm["cubin"]); f.flush()
    text = subprocess.run([os.path.join(tools, "nvdisasm"), "-c", "-g", f.name], capture_output=True, text=True).stdout
src = open(aot.K.__file__).read().split("\n")
starts = [(i + 1, l.split("(")[0][4:]) for i, l in enumerate(src) if l.startswith("def ")]
lines, where = collections.Counter(), None
for l in text.split("\n"):
    m = re.search(r'//## File "([^"]*)", line (\d+)', l)
    if m:
        where = (os.path.basename(m[1]), int(m[2])) if "inlined" not in l or where is None else where
    elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", l) and where:
        lines[where] += 1
funcs = collections.Counter()
for (f, n), c in lines.items():
    name = f
    if f == "triton.py":
        name = [s for a, s in starts if a <= n][-1] if n >= starts[0][0] else f
    funcs[name] += c
print(funcs, sum(funcs.values()))
for (f, n), c in lines.most_common(32): print(c, f, n, src[n - 1].strip()[:110] if f == "triton.py" else "")

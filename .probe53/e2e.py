"""The product's decoder in modes "graph" and "token", and its speed: `python .probe53/e2e.py [folder of a model ...]`."""
import os, subprocess, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import ref  # this checkout's blr
import torch
from blr.compressor.runtime.decoder import Decoder
say = lambda *a: print(*a, flush=True)
def compare(name, model, new=256, prompt=64):
    vocabulary = model.config.vocab_size
    ids = torch.randint(2, vocabulary, (1, prompt), generator=torch.Generator().manual_seed(1))
    made = {mode: Decoder(model, context=prompt + new + 2, mode=mode) for mode in ("graph", "token")}
    out = {mode: d.generate(ids, max_new_tokens=new)[0] for mode, d in made.items()}
    again = made["token"].generate(ids, max_new_tokens=new)[0]
    same = next((i for i, (a, b) in enumerate(zip(out["graph"], out["token"])) if a != b), new)
    said = ""
    if same < new:
        logits = made["graph"].prefill(torch.cat((ids[0], torch.tensor(out["graph"][:same])))[None])[0]
        a, b = out["graph"][same], out["token"][same]
        said = f"; there logits {float(logits[a]):.4f} and {float(logits[b]):.4f}, best {logits.topk(3).values.tolist()}"
    say(f"{name}: {same} of {new} tokens equal{said}; again {'equal' if again == out['token'] else 'NOT EQUAL'}; {len(set(out['token']))} distinct")
for folder in sys.argv[1:]:
    from blr.compressor.loading.load import load_model
    compare(folder, load_model(folder, "AutoModelForCausalLM", dtype="bfloat16", device="cuda"))
from blr.bench.models import Models, find_model
for name, arms in (("7b", ("lowrank", "dense")), ("8b", ("dense",))):
    models = Models(find_model(name), torch.device("cuda"), torch.bfloat16, 400, 2.0, 16, 16)
    for arm in arms:
        compare(f"{name} {arm}", models.get(arm), 128)
    del models
    torch.cuda.empty_cache()

"""compressor/runtime/whole.py on a CPU: the kernel by the emulator, beside the phases in torch."""
import os, sys, threading, types
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch, emulate; torch.set_grad_enabled(False)
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, MistralConfig, MistralForCausalLM
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime import whole
import blr.kernels.decode.token.launch as L
L.describe = emulate.Memory
threading.Thread(target=emulate.dma, daemon=True).start()
base = dict(hidden_size=256, intermediate_size=640, num_hidden_layers=2, vocab_size=512, max_position_embeddings=256)
CASES = {
 "llama": (LlamaForCausalLM, LlamaConfig(**base, num_attention_heads=4, num_key_value_heads=2, head_dim=64)),
 "mistral": (MistralForCausalLM, MistralConfig(**base, num_attention_heads=2, num_key_value_heads=1, head_dim=128, sliding_window=16)),
 "qwen2": (Qwen2ForCausalLM, Qwen2Config(**base, num_attention_heads=2, num_key_value_heads=1)),
 "qwen3": (Qwen3ForCausalLM, Qwen3Config(**base, num_attention_heads=4, num_key_value_heads=2, head_dim=128)),
}
def joined(model):
    """All matrices in one tensor of their kind, which the emulator needs."""
    mats = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    for k in {m.weight.shape[1] for m in mats}:
        own = [m for m in mats if m.weight.shape[1] == k]
        big = torch.cat([torch.randn(3)[:0].to(m.weight.dtype).new_empty(0, k) if 0 else m.weight.data for m in own])
        at = 0
        for m in own:
            m.weight.data = big[at:at + m.weight.shape[0]]; at += m.weight.shape[0]
for name, (cls, config) in CASES.items():
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn_like(p) * .05)
    model = model.to(torch.bfloat16)
    joined(model)
    d = Decoder(model, context=64, ops="torch")
    d.state.buffers["inner"] = d.state.buffers["inner"].float()
    print(name, "lacks:", whole.lacks(d.plan, d.state, 9))
    for programs in (9, 30):
        token = whole.make_token(d.plan, d.state, programs)
        ids = torch.randint(2, 500, (1, 20)); mask = torch.ones_like(ids)
        d.prefill(*[ids, torch.tensor([17])])
        before, after = whole.ends(d.plan)
        errors = []
        for step in range(4):
            pos, kv, tokens = d.state.pos.clone(), d.state.kv.data.clone(), d.state.tokens.clone()
            for r in d.launches(1, 64, before): r()
            n, programs_, *rest = token.sizes
            emulate.launch(*token.arguments, 0, n, *token.sizes, *token.numbers, token.shape)
            x, kv1 = d.state.buffers["x"].clone(), d.state.kv.data.clone()
            d.state.pos.copy_(pos); d.state.kv.data.copy_(kv); d.state.tokens.copy_(tokens)
            for r in d.launches(1, 64, d.plan.phases): r()
            y = d.state.buffers["x"]
            errors.append((f"{((x - y).norm() / y.norm()).item():.1e}", f"{(kv1.float() - d.state.kv.data.float()).abs().max():.1e}"))
        print(name, programs, errors, token.lost())

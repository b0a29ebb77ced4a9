"""The kernel of a whole token compiles without spills for sm_90, by the Triton that is there."""

from __future__ import annotations

import pytest
from compiling import compile_launches

pytest.importorskip("triton.experimental.gluon")
LAUNCH = """
import transformers
from torch import nn
from blr.compressor.modeling.layers import KernelLinear
from blr.compressor.modeling.models import replace_layers
from blr.compressor.runtime import whole
from blr.compressor.runtime.decoder import Decoder

family, rank, dtype, sizes = {family!r}, {rank}, torch.{dtype}, {sizes}
sizes |= dict(num_hidden_layers=2, vocab_size=512, max_position_embeddings=256)
model = getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(**sizes))
linear = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
entries = {{}}
for name, m in linear if rank else ():
    entries[name] = dict(structure="svd", rank=rank, in_features=m.in_features)
    entries[name] |= dict(out_features=m.out_features)
replace_layers(model, entries)
model = model.eval().to(dtype)
for layer in model.modules():
    if isinstance(layer, KernelLinear):
        layer.relayout_()
decoder = Decoder(model, context=64, ops="torch")
whole.make_token(decoder.plan, decoder.state, 132).launch()
"""
USUAL = {"hidden_size": 256, "intermediate_size": 656}
USUAL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD = {"hidden_size": 576, "intermediate_size": 648}
ODD |= {"num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("family", "rank", "dtype", "sizes"),
    [
        ("Llama", 0, "bfloat16", USUAL),
        ("Llama", 136, "float16", ODD),
        ("Qwen2", 0, "float16", USUAL),
        ("Qwen3", 0, "bfloat16", {**USUAL, "head_dim": 128}),
    ],
    ids=["dense", "low-rank-nine-heads", "biases", "head-norms"],
)
def test_it_compiles_without_spills(family: str, rank: int, dtype: str, sizes: dict[str, int]) -> None:
    code = LAUNCH.format(family=family, rank=rank, dtype=dtype, sizes=sizes)
    assert compile_launches(code) == [["token_kernel", 0]]

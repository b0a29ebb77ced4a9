"""Adding a structure touches two places, a storage one: made-up ones, as in compressor/README.md."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import bare
import pytest
import torch
from pico import MODELS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.modeling import modeling_blr
from blr.compressor.modeling.layers import layer_of
from blr.compressor.modeling.models import model_class
from blr.compressor.planning.roofline import find_gpu, layer_time
from blr.compressor.structures import specs
from blr.compressor.structures.base import FitOptions
from blr.compressor.structures.packing import pack_factor, restored
from blr.compressor.structures.registry import STRUCTURES, LayerSizes, Structure
from blr.compressor.structures.spec import Shape, Spec

register()
# The first place: formula and shapes, in the file that travels.
FORMULA = '''

def scaled(entry, x, bias, U, d, V):
    """``W = U diag(d) Vᵀ``: U [o, r], d [r], V [i, r]."""
    return linear(x @ V * d, U, bias)


STRUCTURES["scaled"] = Formula(lambda n: {"U": (n.o, n.r), "d": (n.r,), "V": (n.i, n.r)}, scaled)
'''


# The second: spec, fit and entry of the registry, in the room `structures`.
@dataclass(frozen=True)
class ScaledSpec(Spec):
    rank: int
    structure = "scaled"

    def shapes(self) -> dict[str, Shape]:
        r = self.rank
        return {"U": (self.out_features, r), "d": (r,), "V": (self.in_features, r)}

    def describe(self) -> str:
        return f"r={self.rank}"


def fit(
    weight: Tensor, spec: ScaledSpec, gram: Tensor | None = None, options: FitOptions | None = None
) -> dict[str, Tensor]:
    U, d, V = torch.linalg.svd(weight, full_matrices=False)
    return {"U": U[:, : spec.rank], "d": d[: spec.rank], "V": V.mT[:, : spec.rank]}


def reconstruct(factors: dict[str, Tensor], spec: Any) -> Tensor:
    return factors["U"] * factors["d"] @ factors["V"].mT


def of_rank(form: LayerSizes, rank: int) -> Spec:
    return ScaledSpec(form.inputs, form.outputs, rank)


ENTRY = Structure(ScaledSpec, ("closed-form",), of_rank, iterated=False)
REMOTE = (
    bare.without("blr")
    + """
import json
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    print(json.dumps(model(torch.arange(2, 14)[None]).logits.tolist()))
"""
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places."""
    monkeypatch.setitem(modeling_blr.STRUCTURES, "scaled", None)  # so that it goes again
    exec(compile(FORMULA, "diff", "exec"), vars(modeling_blr))
    monkeypatch.delattr(modeling_blr, "scaled")
    module: Any = ModuleType("scaled")
    module.fit, module.reconstruct = fit, reconstruct
    monkeypatch.setitem(sys.modules, "blr.compressor.structures.scaled", module)
    monkeypatch.setitem(specs.SPECS, "scaled", ScaledSpec)
    monkeypatch.setitem(STRUCTURES, "scaled", ENTRY)


@pytest.mark.fast
def test_a_layer_of_it_computes_stores_and_is_packed(added: None) -> None:
    weight, x = torch.randn(12, 20), torch.randn(5, 20)
    spec = STRUCTURES["scaled"].of_rank(LayerSizes(20, 12), 12)  # type: ignore[misc]
    factors = STRUCTURES["scaled"].factorizer().fit(weight, spec)
    plain, exported = (layer_of(spec, False, exported=laid) for laid in (False, True))
    plain.load_state_dict(factors)
    torch.testing.assert_close(plain(x), x @ weight.mT)
    torch.testing.assert_close(restored(spec, plain.state_dict(), torch.float32), weight)
    exported.load_state_dict(
        {"U_kernel": factors["U"], "d_kernel": factors["d"], "V_kernel": factors["V"].mT}
    )
    torch.testing.assert_close(exported(x), x @ weight.mT)
    packing = specs.QuantizedSpec(spec, 8, 32)
    assert specs.spec_from_dict(packing.to_dict()) == packing
    parts = (pack_factor(packing, name, factor, torch.float32) for name, factor in factors.items())
    packed = layer_of(packing, False)
    packed.load_state_dict({name: tensor for part in parts for name, tensor in part.items()})
    assert (packed(x) - plain(x)).norm() < 0.05 * plain(x).norm()
    assert layer_time(packing, 1, find_gpu("h200")) > 0


def test_a_model_of_it_loads_with_the_package_and_without(added: None, tmp_path: Path) -> None:
    kind, settings, name = MODELS["llama"]
    size = settings["hidden_size"]
    entry = ScaledSpec(size, size, 8).to_dict()
    table = {f"model.layers.{n}.self_attn.o_proj": entry for n in range(settings["num_hidden_layers"])}
    config = modeling_blr.config_class(f"Blr{kind}")(**settings, blr={"format": 1, "layers": table})
    model = model_class(f"Blr{name}")(config).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(again.model.layers[0].self_attn.o_proj, modeling_blr.FormulaLinear)
    file = tmp_path / "modeling_blr.py"
    file.write_text(file.read_text() + FORMULA)
    done = bare.run(REMOTE, tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(torch.arange(2, 14)[None]).logits
        assert torch.equal(again(torch.arange(2, 14)[None]).logits, expected)
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), expected)


@pytest.mark.fast
def test_a_storage_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in float16 whatever the model computes in."""
    half = modeling_blr.Storage(
        *(("_half",), False, lambda factor: (torch.zeros(factor.shape, dtype=torch.float16),)),
        lambda factor, stored: stored.float(),
    )
    monkeypatch.setitem(modeling_blr.STORAGES, "half", half)
    entry = {"structure": "svd", "in_features": 6, "out_features": 4, "rank": 3}
    found, plain = (modeling_blr.linear_of(e, True) for e in ({**entry, "storage": "half"}, entry))
    assert {name for name, _ in found.named_buffers()} == {"U_half", "V_half"}
    found.load_state_dict({f"{n}_half" if n in "UV" else n: t for n, t in plain.state_dict().items()})
    x = torch.randn(5, 6)
    torch.testing.assert_close(found(x), plain(x), atol=1e-2, rtol=1e-2)
    assert isinstance(found.bias, nn.Parameter)

"""What BLR_DECODE=token does where the kernel of a whole token cannot run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from exporting import export_to
from running import Invoke
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from blr.compressor.modeling import generation as fused


def test_a_mode_that_the_kernel_lacks_is_refused_where_the_runtime_runs(
    exports: dict[str, Path], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blr.compressor.runtime import decoder

    monkeypatch.setattr(fused, "obstacle", lambda device: None)
    monkeypatch.setattr(decoder, "Decoder", partial(decoder.Decoder, ops="torch"))
    monkeypatch.setenv("BLR_DECODE", "token")
    code, out, err = invoke("generate", exports["svd"], "a", "--device", "cpu")
    assert (code, out) == (9, "")
    assert "mode 'token': found cpu, expected a GPU of capability 9; use mode 'graph'" in err


def test_without_a_gpu_the_mode_is_for_transformers_too(
    exports: dict[str, Path], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = invoke("generate", exports["svd"], "a", "--device", "cpu")
    monkeypatch.setenv("BLR_DECODE", "token")
    found = invoke("generate", exports["svd"], "a", "--device", "cpu")
    assert found[:2] == usual[:2] and found[0] == 0


def test_a_self_contained_export_refuses_what_it_left_out(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    own = export_to(sources["svd"], tmp_path / "own", self_contained=True)
    decoder = get_class_from_dynamic_module("runtime_blr.Decoder", own)
    with pytest.raises(ValueError, match="mode 'token': found a self-contained export, expected the"):
        decoder(
            AutoModelForCausalLM.from_pretrained(own, trust_remote_code=True),
            context=64,
            ops="torch",
            mode="token",
        )

"""transformers' own common tests of model classes, run over ours: `scripts/check_transformers.sh`
fetches their file and calls pytest with this one. A test that the dense class fails as well is skipped.

BLR_COMMON names the folder that holds ``test_modeling_common.py``.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import types
import unittest
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from pico import MODELS, MORE, save_model

from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import register
from blr.compressor.recipe.schema import Recipe

if not torch.accelerator.is_available():
    # The one test that starts a process of its own is skipped there: skip it here
    os.environ["_INSIDE_SUB_PROCESS"] = "1"
torch.set_printoptions(threshold=0, edgeitems=1)  # messages name tensors that agree as well
BATCH, LENGTH = 3, 7
PICO = {**MODELS, **MORE}
WAYS = {
    "Svd": {"method": "svd", "cf": 1.5},
    "Int2": {"method": "svd", "base": "int2", "rank": 2, "group": 32},
}
FAMILIES = {
    "llama": ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"),
    "bert": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    "gpt2": ("Model", "LMHeadModel", "ForSequenceClassification"),
    "t5": ("Model", "ForConditionalGeneration"),
}


def _common() -> Any:
    """The module of the common tests, without the mixins of other files that it inherits from."""
    package, mixins = types.ModuleType("common"), (("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"))  # fmt: skip
    package.__path__ = [os.environ["BLR_COMMON"]]
    sys.modules["common"] = package
    for module, mixin in mixins:
        stub = types.ModuleType(f"common.{module}")
        setattr(stub, mixin, type(mixin, (), {}))
        sys.modules[f"common.{module}"] = stub
        folder, _, _ = module.partition(".")
        sys.modules[f"common.{folder}"] = types.ModuleType(f"common.{folder}")
    from common import test_modeling_common as found

    values = found.get_values
    found.get_values = lambda mapping: [n for v in values(mapping) for n in (v, f"Blr{v}")]
    names = found.MODEL_MAPPING_NAMES
    found.MODEL_MAPPING_NAMES = {**names, **{f"Blr{k}": f"Blr{v}" for k, v in names.items()}}
    return found


COMMON = _common()


@cache
def config_of(family: str, way: str | None) -> Any:
    """The configuration of a pico model of a family, dense or compressed in one of the `WAYS`."""
    config_name, settings, model_name = PICO[family]
    if way is None:
        return getattr(transformers, config_name)(**settings)
    with tempfile.TemporaryDirectory() as work:
        dense, small = Path(work) / "dense", Path(work) / "small"
        save_model(config_name, settings, model_name, dense)
        options = Settings("dense", device="cpu", check=False)
        compress(dense, Recipe(**WAYS[way]), small, options, Progress(quiet=True))
        transformers.logging.set_verbosity_warning()  # tests look for warnings
        register(family)
        return transformers.AutoConfig.from_pretrained(small)


class Tester:
    """Configuration and inputs, as the common tests ask for them."""

    batch_size, seq_length, is_training = BATCH, LENGTH, True
    encoder_seq_length = decoder_seq_length = key_length = LENGTH

    def __init__(self, family: str, way: str | None) -> None:
        self.family, self.way = family, way
        config = config_of(family, way)
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads

    def get_config(self) -> Any:
        return copy.deepcopy(config_of(self.family, self.way))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        config = self.get_config()
        config.pad_token_id = 0  # of which several rows are asked for
        ids = torch.randint(3, config.vocab_size, (BATCH, LENGTH))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs |= {f"decoder_{name}": value for name, value in inputs.items()}
        return config, inputs


def _native(family: str) -> list[str]:
    prefix = PICO[family][0].removesuffix("Config")
    return [prefix + suffix for suffix in FAMILIES[family]]


def _dense_case(family: str) -> type:
    class Dense(COMMON.ModelTesterMixin, unittest.TestCase):
        all_model_classes = tuple(getattr(transformers, name) for name in _native(family))
        is_encoder_decoder = family == "t5"

        def setUp(self) -> None:
            self.model_tester = Tester(family, None)

    return Dense


def _as_dense(name: str, dense: type) -> Any:
    """The test `name` of a structured class, skipped where the dense class fails it."""

    def run(self: Any, *arguments: Any, **options: Any) -> None:
        inherited: Any = super(type(self), self)
        try:
            getattr(inherited, name)(*arguments, **options)
        except unittest.SkipTest:
            raise
        except Exception as error:
            twin = dense(name)
            twin.setUp()
            try:
                getattr(twin, name)()
            except Exception:
                raise unittest.SkipTest("the dense class fails it, too") from error
            raise

    return run


def _structured_case(family: str, way: str) -> type:
    dense = _dense_case(family)

    def setup(self: Any) -> None:
        self.model_tester = Tester(family, way)

    tests = {name: _as_dense(name, dense) for name in dir(dense) if name.startswith("test_")}
    values = {name: value for name, value in tests.items() if callable(getattr(dense, name))}
    classes = tuple(model_class(f"Blr{name}") for name in _native(family))
    return type(
        f"Test{family.title()}{way}",
        (dense,),
        {**values, "setUp": setup, "all_model_classes": classes, "__module__": __name__},
    )


globals().update(
    {case.__name__: case for case in (_structured_case(*each) for each in product(FAMILIES, WAYS))}
)

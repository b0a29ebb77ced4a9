"""What transformers and packages with it decide by the name of a class or of a model type: of our models
as of the native ones.

Each entry of `DECISIONS` is how such code asks, found by reading it for names of classes, tables of
names, `model_type`, `architectures` and `isinstance`. All tables and types are compared whole; places
that ask for a class by its own name are listed in `PLACES`, and a new version's new ones fail a test.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bare
import pytest
import transformers
from exporting import compress_to
from pico import MODELS, MORE, save_model, save_pico, save_seeing
from spoiling import words_tokenizer
from transformers import modelcard
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto import (
    feature_extraction_auto,
    image_processing_auto,
    modeling_auto,
    processing_auto,
    tokenization_auto,
    video_processing_auto,
)
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pipelines import SUPPORTED_TASKS

from blr.compressor import register
from blr.compressor.modeling.modeling_blr import PREFIX, config_class
from blr.compressor.modeling.models import model_class

register()

pytestmark = pytest.mark.fast

FAMILIES = ("llama", "gpt2", "bert-mlm", "roberta", "vit", "t5", "mixtral", "distilbert", "opt")
TABLES = {name: t for name, t in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
PROCESSORS = {
    "feature extractor": feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING,
    "image processor": image_processing_auto.IMAGE_PROCESSOR_MAPPING,
    "processor": processing_auto.PROCESSOR_MAPPING,
    "tokenizer": tokenization_auto.TOKENIZER_MAPPING,
    "video processor": video_processing_auto.VIDEO_PROCESSOR_MAPPING,
}


def named(names: dict[str, Any], model: Any) -> bool:
    """Whether a table of transformers has the class of a model, alone or beside others."""
    found = [(n,) if isinstance(n, str) else n for n in names.values()]
    return any(type(model).__name__ in each for each in found)


def mapped(mapping: Any, model: Any) -> str:
    """The name of what a lazy mapping gives for a configuration, without our prefix."""
    found = mapping.get(type(model.config), None)
    found = found if isinstance(found, tuple | list) else (found,)
    return ", ".join(getattr(each, "__name__", str(each)).removeprefix(PREFIX) for each in found)


def renamings(model: Any) -> list[str]:
    return sorted(str(getattr(r, "source_patterns", r)) for r in get_model_conversion_mapping(model))


def natives(cls: type) -> list[str]:
    """What of transformers a class inherits from."""
    return [base.__name__ for base in cls.__mro__ if base.__module__.startswith("transformers.")]


ENDS = ("ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForRetrieval", "Model")
DECISIONS: dict[str, Callable[[Any], object]] = {
    # Trainer: shifted labels with label smoothing; model cards: the task; `transformers serve`: what
    # a model sees and writes; pipelines: what they support
    "tables of class names": lambda model: [name for name, t in TABLES.items() if named(t, model)],
    "Trainer: smoothed labels are shifted": lambda model: (
        model._get_name() in TABLES["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"].values()
    ),
    "Trainer: no head": lambda model: type(model).__name__ in TABLES["MODEL_MAPPING_NAMES"],
    "model cards: tasks": lambda model: [
        task
        for task, mapping in modelcard.TASK_MAPPING.items()
        if type(model).__name__ in modelcard._get_mapping_values(mapping)
    ],
    # lm-eval: causal or sequence to sequence; attention visualizer, sentence-transformers: by type
    "tables of model types": lambda model: [
        name for name, t in TABLES.items() if model.config.model_type in t
    ],
    # generation (whisper, llama4), pipelines (siglip, csm), peft (mamba, gpt2), TRL (gpt_oss), megatron
    "comparisons with a model type": lambda model: model.config.model_type,
    "the loss": lambda model: model.loss_type,
    "renamed tensors": renamings,
    # accelerate, FSDP: blocks that stay whole
    "blocks that are not split": lambda model: sorted(
        {type(m).__name__ for m in model.modules()} & set(model._no_split_modules or ())
    ),
    **{
        f"modules of a name with {part}": lambda model, part=part: sum(
            part in type(m).__name__ for m in model.modules()
        )
        for part in ("Norm", "LayerNorm", "RMSNorm", "RotaryEmbedding")
    },
    # `transformers serve`, pipelines, TRL; sentence-transformers goes by the ends of names
    "classes by config.architectures": lambda model: (
        getattr(sys.modules["transformers"], type(model).__name__, None) is type(model)
    ),
    "ends and parts of class names": lambda model: [
        *(end for end in ENDS if type(model).__name__.endswith(end)),
        *(part for part in ("maskedlm", "donut", "assistant") if part in type(model).__name__.lower()),
    ],
    # sentence-transformers: encoders of encoder-decoders; generation: vision-encoder-decoders
    "instances of a configuration": lambda model: natives(type(model.config)),
    "instances of a model": lambda model: natives(type(model)),
    **{
        f"{name} by configuration": lambda model, mapping=mapping: mapped(mapping, model)
        for name, mapping in PROCESSORS.items()
    },
    "Auto classes": lambda model: {
        name: mapped(mapping, model)
        for name, mapping in vars(modeling_auto).items()
        if isinstance(mapping, _LazyAutoMapping) and type(model.config) in mapping
    },
    "pipelines": lambda model: [
        task
        for task, about in SUPPORTED_TASKS.items()
        if any(type(model.config) in auto._model_mapping for auto in about["pt"])
    ],
    "generation": lambda model: model.can_generate(),
}


def pair(name: str) -> tuple[Any, Any]:
    """A structured model of a family, without any structured layer, and the native one."""
    kind, settings, model = {**MODELS, **MORE}[name]
    native = getattr(transformers, kind)(**settings)
    CONFIG_MAPPING[f"blr_{native.model_type}"]
    ours = config_class(PREFIX + kind)(**settings, blr={"format": 1, "layers": {}})
    return model_class(PREFIX + model)(ours), getattr(transformers, model)(native)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Any, Any]]:
    return {name: pair(name) for name in FAMILIES}


@pytest.mark.parametrize("decision", DECISIONS.values(), ids=DECISIONS)
def test_ours_are_decided_on_as_the_native_ones(
    decision: Callable[[Any], object], pairs: dict[str, tuple[Any, Any]]
) -> None:
    found = {name: decision(ours) for name, (ours, _) in pairs.items()}
    assert found == {name: decision(native) for name, (_, native) in pairs.items()}


def test_what_files_say_is_the_type_of_our_own(pairs: dict[str, tuple[Any, Any]]) -> None:
    for ours, native in pairs.values():
        config, kind = ours.config, f"blr_{native.config.model_type}"
        assert type(config).model_type == config.to_dict()["model_type"] == kind
        again = type(config).from_dict(json.loads(config.to_json_string()))
        assert again.model_type == native.config.model_type and again.blr == config.blr


def test_losses_of_all_classes_that_have_one_of_their_own() -> None:
    """`loss_type` is looked for in the name of the class."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    pattern = f"({'|'.join(LOSS_MAPPING)})"
    listed = [each for table in TABLES.values() for each in table.values()]
    names = {n for each in listed for n in ((each,) if isinstance(each, str) else each)}
    for name in (n for n in names if not n.startswith(PREFIX)):
        expected = [name] if name in LOSS_MAPPING else re.findall(pattern, name)[:1]
        assert re.findall(pattern, PREFIX + name)[:1] == expected, name


# Loads with fused patches
FUSED = """
import sys
from transformers import AutoModelForImageTextToText
from blr.compressor import register
register()
AutoModelForImageTextToText.from_pretrained(sys.argv[1], fusion_config={"patch_embeddings": True})
"""


def test_the_class_that_a_file_names_is_found(tmp_path: Path) -> None:
    """As `transformers serve`, pipelines and TRL look for it, without a word about the task."""
    output = compress_to(save_pico("bert-mlm", tmp_path / "dense"), tmp_path / "out", method="svd")
    (name,) = transformers.AutoConfig.from_pretrained(output).architectures
    found = getattr(import_module("transformers"), name)
    assert type(found.from_pretrained(output)).__name__ == "BlrBertForMaskedLM"


def test_xlnet_begins_its_prompts_as_the_native_class(tmp_path: Path) -> None:
    """The pipeline knows that class by its name, and any model by its configuration's prefix."""
    settings = {"vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48}
    save_model("XLNetConfig", settings, "XLNetLMHeadModel", tmp_path / "dense")
    output = compress_to(tmp_path / "dense", tmp_path / "out", method="svd", rank=4)
    words_tokenizer().save(str(tmp_path / "tokenizer.json"))
    reader = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    begun = []
    for folder in (tmp_path / "dense", output):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=reader)
        begun.append(pipe._preprocess_params)
    assert begun[0] == begun[1] and "In 1991" in begun[0]["prefix"]


def test_fused_patches_are_refused_where_their_weights_find_no_place(tmp_path: Path) -> None:
    """Fusions are kept by the type of the configuration's class, which is ours."""
    output = compress_to(save_seeing("qwen3_vl", tmp_path / "dense"), tmp_path / "out", method="svd")
    done = bare.run(FUSED, output)
    assert done.returncode == 1 and re.search(
        r"ValueError: missing keys .*patch_embed\.linear_proj", done.stderr
    )


TYPES = ("vit", "llava", "whisper", "clip", "wav2vec2", "qwen2_vl", "bert", "layoutlmv3")


@pytest.mark.parametrize("kind", TYPES)
def test_processors_are_those_of_the_native_type(kind: str) -> None:
    native, ours = CONFIG_MAPPING[kind], CONFIG_MAPPING[f"blr_{kind}"]
    found = {name: native in mapping for name, mapping in PROCESSORS.items()}
    assert {name: ours in mapping for name, mapping in PROCESSORS.items()} == found
    assert any(found.values())


# Loads what belongs to each folder with the code in it; prints the classes
REMOTE = (
    bare.without("blr")
    + """
import json
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
trusted = {"trust_remote_code": True}
vit, llava, llama = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(llama, **trusted)
readers = [transformers.AutoTokenizer.from_pretrained(llama, trust_remote_code=t) for t in (False, True)]
print(json.dumps([
    type(transformers.AutoImageProcessor.from_pretrained(vit, **trusted)).__name__,
    type(transformers.AutoProcessor.from_pretrained(llava, **trusted)).__name__,
    model._get_name() in CAUSAL.values(),
    model.config.model_type,
    *(reader("protocol rules")["input_ids"] for reader in readers),
]))
"""
)


def test_with_the_code_in_the_folder_alone(tmp_path: Path) -> None:
    images = {"do_resize": True, "do_normalize": True, "size": 32, "image_mean": [0.5] * 3}
    vit, llava = save_pico("vit", tmp_path / "vit"), save_seeing("llava", tmp_path / "llava")
    llama = save_pico("llama", tmp_path / "llama")
    (vit / "preprocessor_config.json").write_text(json.dumps({**images, "image_std": [0.5] * 3}))
    (llava / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    for folder in (llava, llama):
        words_tokenizer().save(str(folder / "tokenizer.json"))
    ids = transformers.AutoTokenizer.from_pretrained(llama)("protocol rules")["input_ids"]
    outputs = [compress_to(f, tmp_path / f"{f.name}-out", method="svd") for f in (vit, llava, llama)]
    done = bare.run(REMOTE, *outputs)
    assert done.returncode == 0, done.stderr
    expected = [
        type(transformers.AutoImageProcessor.from_pretrained(vit)).__name__,
        type(transformers.AutoProcessor.from_pretrained(llava)).__name__,
        *(True, "llama", ids, ids),
    ]
    # the tokenizer inside a processor asks for itself, and takes no code without an answer
    assert json.loads(done.stdout.splitlines()[-1].rpartition("[y/N] ")[2]) == expected


# How code asks for a class by its own name, for the classes that a file names, and for the type of a
# class of configurations. Tables of names and types of configurations are compared whole, above.
ASKING = {
    "class": re.compile(
        r"(__class__|type\([\w.]+\))\.__name__(\.lower\(\))?"
        r"\s*(==|!=|(not )?in\b|\.(startswith|endswith)\()"
        r"|[\"'] (not )?in [\w.]+\.__class__\.__name__|_get_name\(\)"
    ),
    "named": re.compile(r"\.architectures\b|[\"']architectures[\"']"),
    "configuration": re.compile(
        r"config\.__class__\b|type\((self\.)?(model\.)?config\)\.__name__|config_class\.model_type"
    ),
}
SAME, OTHER, LOUD = "compared above", "not of models", "not as of the native class, with an error"
PLACES = {
    "transformers/cli/serving/model_manager.py": SAME,
    "transformers/cli/serving/utils.py": SAME,
    "transformers/configuration_utils.py": OTHER,  # of a configuration inside another
    "transformers/decision/modeling_utils.py": OTHER,  # Auto class of folders with a head beside them
    "transformers/dynamic_module_utils.py": OTHER,  # tokenizers
    "transformers/fusion_mapping.py": LOUD,
    "transformers/generation/candidate_generator.py": SAME,
    "transformers/generation/stopping_criteria.py": OTHER,  # tokenizers
    "transformers/generation/utils.py": LOUD,  # Gemma 4 with an assistant; Donut is compared
    "transformers/integrations/accelerate.py": SAME,
    "transformers/integrations/gguf/": OTHER,  # files of another format
    "transformers/integrations/hub_kernels.py": LOUD,  # as fusions
    "transformers/integrations/integration_utils.py": OTHER,  # peft's
    "transformers/modeling_gguf_pytorch_utils.py": OTHER,
    "transformers/modeling_utils.py": SAME,
    "transformers/pipelines/any_to_any.py": OTHER,  # tokenizers
    "transformers/pipelines/automatic_speech_recognition.py": SAME,
    "transformers/pipelines/base.py": SAME,
    "transformers/pipelines/document_question_answering.py": LOUD,  # LayoutLM 1, Donut
    "transformers/pipelines/image_segmentation.py": LOUD,  # OneFormer
    "transformers/pipelines/image_text_to_text.py": OTHER,
    "transformers/pipelines/text_generation.py": SAME,  # XLNet
    "transformers/processing_utils.py": OTHER,
    "transformers/quantizers/auto.py": OTHER,  # configurations of quantization
    "transformers/tokenization_utils_tokenizers.py": OTHER,
    "transformers/trainer.py": SAME,
    "transformers/trainer_pt_utils.py": SAME,
    "transformers/utils/hub.py": OTHER,  # kinds of files
    "accelerate/accelerator.py": OTHER,  # schedulers
    "accelerate/hooks.py": OTHER,  # layers of bitsandbytes
    "accelerate/utils/": SAME,  # blocks that are not split, Megatron
    "peft/": SAME,  # tests/packages/test_peft.py; blocks that are not split
    "sentence_transformers/": SAME,
    "lm_eval/models/utils.py": OTHER,  # tokenizers
}
PACKAGES = ("transformers", "accelerate", "peft", "sentence_transformers", "lm_eval", "trl")
PLACES["trl/"] = SAME


def asking() -> Iterator[str]:
    """Files of the installed packages that ask so; not those of single models."""
    for package in PACKAGES:
        if (found := find_spec(package)) is None or found.origin is None:
            continue
        top = Path(found.origin).parent
        for path in top.rglob("*.py"):
            name = path.relative_to(top.parent).as_posix()
            if name.startswith(("transformers/models/", "transformers/testing", "lm_eval/tasks/")):
                continue
            lines = (line for line in path.read_text().splitlines() if line.lstrip()[:1] not in "#>")
            if any(asks.search(line) for line in lines for asks in ASKING.values()):
                yield name


def test_every_place_that_asks_for_a_class_is_known() -> None:
    """One that a new version brings is read, compared above if it asks otherwise, and listed."""
    found = set(asking())
    assert len(found) > 20
    assert sorted(name for name in found if not any(map(name.startswith, PLACES))) == []

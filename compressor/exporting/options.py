"""What the command line says of an export, checked."""

from dataclasses import dataclass, replace
from pathlib import Path

from blr.compressor.base.device import DTYPES
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.exhaustion import check_packages
from blr.compressor.checkpoint.context import NGRAM
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.recipe.option import check_limits
from blr.compressor.recipe.settings import RunSettings

QUANTIZED = ("int8", "int4")
NONE = "none"
_KERNELS = ("gpu", "quantize", "quantize_head", "kv_quantize", "self_contained", "draft")
_RUNTIME = ("batch", "context", *_KERNELS)
ENGINES = ("vllm", "mlx", "gguf")  # inference engines of others, each a module of this room
NO_USE = {  # what is exported to the options that it has no use for
    **dict.fromkeys(("dense", "plain", *ENGINES), _RUNTIME),
    "onnx": _KERNELS,
    "pt2": ("draft",),
}
KINDS = ("folder", "pt2", "dense", "plain", "onnx", *ENGINES)
COMPILED = "model.pt2"
GRAPH, GRAPH_WEIGHTS = "model.onnx", "model.onnx.data"
GRAPH_WRITERS = ("onnx", "onnxscript")
MAX_BATCH = 16
DEFAULT_CONTEXT = 8192  # tokens; a larger one must be asked for, since a cache is allocated for it


@dataclass(frozen=True)
class ExportOptions(RunSettings):
    """What `blr export` is asked for. `quantize` leaves the output head, which has a kind of its own.

    Options:
        kind (--as): Form of the export: folder (kernels and runtime), pt2 (a compiled encoder beside
            it), onnx (a graph), dense (an ordinary checkpoint), plain (low-rank layers as two linear
            ones), vllm (compressed-tensors), mlx or gguf (llama.cpp), each with an adapter
            for corrections.
        dense_rest: For vllm, mlx and gguf: write dense the layers that they have no form of.
        gpu: GPU to export for, a name in configs/gpus.yaml. [this machine's, else h200]
        batch: Sequences decoded at once, 1 to 16.
        context: Tokens of prompt and answer together. [the model's maximum, 8192 at most]
        dtype: Store weights in bfloat16, float16 or float32. [as stored]
        quantize: Store weights in int8 or int4, in groups of 128; the output head stays.
        quantize_head: Store the output head of a decoder in int8 or int4, untied from the embedding;
            or none. [none]
        kv_quantize: Cache keys and values in int8, half the memory; or none. [as the checkpoint's cache]
        self_contained: Put kernels and runtime into the folder, for machines without blr-compress.
        draft: Put this smaller model beside it, as a compressed one, to propose tokens that it checks;
            ngram proposes what followed the last two tokens before.
        text: Measure the loss of a decoder on this text. [what a small model writes itself]
    """

    kind: str = KINDS[0]
    dense_rest: bool = False
    gpu: str | None = None
    batch: int = 1
    context: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    quantize_head: str | None = None
    kv_quantize: str | None = None
    self_contained: bool = False
    draft: str | None = None
    text: Path | None = None

    @property
    def small(self) -> str | None:
        return None if self.draft == NGRAM else self.draft

    @property
    def target(self) -> str:
        """The GPU that it is for, as configs/gpus.yaml writes it."""
        return chosen_gpu(self.gpu)[0].name


def check_options(options: ExportOptions) -> ExportOptions:
    """`options` with None for a kind "none". Raises UsageError; CapabilityError for more sequences than
    the kernels take, or packages that are not installed."""
    check_limits(options)
    if not 1 <= options.batch <= MAX_BATCH:
        refusal = UsageError if options.batch < 1 else CapabilityError
        said = f"--batch {options.batch}: the decoding kernels take 1 to {MAX_BATCH} sequences"
        raise refusal(f"{said}; export for fewer, larger batches generate with transformers")
    if options.context is not None and options.context < 1:
        raise UsageError(f"--context {options.context}: expected a number of tokens, at least 1")
    for name, value, known in (
        ("dtype", options.dtype, DTYPES),
        ("quantize", options.quantize, QUANTIZED),
        ("quantize-head", options.quantize_head, (*QUANTIZED, NONE)),
        ("kv-quantize", options.kv_quantize, ("int8", NONE)),
        ("as", options.kind, KINDS),
    ):
        if value is not None and value not in known:
            raise UsageError(f"--{name} {value}: expected one of {', '.join(known)}")
    head = None if options.quantize_head == NONE else options.quantize_head
    options = replace(options, quantize_head=head)
    _check_meant(options)
    if options.kind == "onnx":
        check_packages("--as onnx", *GRAPH_WRITERS, extra="onnx")
    chosen_gpu(options.gpu)
    return options


def _check_meant(options: ExportOptions) -> None:
    """Raise UsageError for an option that `options.kind` has no use for."""
    for name in NO_USE.get(options.kind, ()):
        if getattr(options, name) != getattr(ExportOptions, name):
            value = getattr(options, name)
            option = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise UsageError(f"{option}: --as {options.kind} has no use for it; leave one of them out")
    if options.dense_rest and options.kind not in ENGINES:
        raise UsageError(f"--dense-rest: it is for --as {' or '.join(ENGINES)}; leave it out")

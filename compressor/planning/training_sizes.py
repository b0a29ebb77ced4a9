"""Sizes that fits and healing share with the forecasts of them, without torch: a model's dimensions, and
how much text, memory and training there is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blr.compressor.checkpoint.context import of_text
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.spec import Spec
from blr.compressor.structures.specs import DenseSpec

BATCH = 8  # windows or sentences run through a block at once
SENSITIVITY_TOKENS = 32768  # of the calibration that the backward sweep sees
GPU_EPOCHS = 2  # of the refit on a GPU when the recipe does not say
PACKED_EPOCHS = 4  # where weights are packed, which has more to make good
FINISH_EPOCHS = 8  # of the last pass on a GPU when the recipe does not say
HELD_BACK = 16  # one batch in so many is not trained on
PART_WORK = 1 << 37  # floating-point operations that make a part of a batch worth a pass of its own
# Inputs and outputs of a layer that is run by its dense weight. A token's products with that take time
# as i o does, what BLAST moves for it as b r: they meet at some 8,000 (LOG, 2026-11-26)
WIDEST = 8192
STATES = 3  # kinds of states of all batches that are kept: dense, student, what a block should give
KEPT_SHARE = 0.3  # of a GPU's free memory, for each kind of tensors of all batches
LOGITS = 1 << 30  # bytes of logits of one kind that the last pass holds
CHUNK = 1 << 26  # logits that healing makes at once
LAST_SHARE = 0.8  # of a GPU's memory that the last pass may take
HALF, SINGLE, DOUBLE = 2, 4, 8  # bytes of a number
HOST_BYTES = 3.5e9  # of Python, torch and CUDA in the host's memory
KINDS = 6  # tensors of the logits' size in the last pass, at the most
TRAINED = 48  # bytes there of a trained number with its gradients, moments and copies, at the most
MOST = 1 << 40  # the largest number that is believed of a size in config.json


def refit_epochs(recipe: Recipe, specs: Iterable[Spec], gpu: bool) -> int:
    """The epochs of training each block after its fits; unless the recipe says, none on a CPU."""
    usual = PACKED_EPOCHS if any(spec.quantized for spec in specs) else GPU_EPOCHS
    return usual * gpu if recipe.refit is None else recipe.refit


def reads_sensitivities(recipe: Recipe, specs: Iterable[Spec], epochs: int) -> bool:
    """Whether sensitivities of outputs are worth measuring: ranks and bits are shared out by them, fits
    and the refit's `epochs` weigh errors by them. Rounding alone reads none."""
    rounded = all(spec.fitted().structure == DenseSpec.structure for spec in specs)
    return recipe.allocation != "uniform" and bool(epochs or recipe.bpw is not None or not rounded)


@dataclass(frozen=True)
class Dimensions:
    """A model's number of blocks, widths of its states and of its MLP, and vocabulary (0 if unknown);
    `tied`: its output head is the embedding."""

    blocks: int
    width: int
    middle: int
    vocabulary: int
    tied: bool

    @property
    def tables(self) -> int:
        """Numbers in the embedding and the head."""
        return self.vocabulary * self.width * (1 if self.tied else 2)


def dimensions_of(config: Mapping[str, object]) -> Dimensions:
    """The dimensions that `config` gives, with 1 or a usual size for those that it does not."""
    text = of_text(config)

    def number(*names: str) -> int:
        found = (text.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and 0 < value < MOST), 0)

    width = number("hidden_size", "n_embd", "dim") or 1
    blocks = number("num_hidden_layers", "n_layer", "n_layers") or 1
    middle = number("intermediate_size", "n_inner", "ffn_dim", "hidden_dim") or 4 * width
    tied = bool(config.get("tie_word_embeddings", True))
    return Dimensions(blocks, width, middle, number("vocab_size"), tied)


def last_pass_bytes(weights: int, widths: int, tokens: int, logit_bytes: int) -> float:
    """Upper estimate of a GPU's bytes in the last pass over dense `weights`, with activations of
    `tokens` in all layers' `widths`, and logits of `logit_bytes` a token."""
    logits = KINDS * min(tokens * logit_bytes, 2 * LOGITS)
    return TRAINED * weights + SINGLE * 2 * tokens * widths + logits


def logit_parts(logit_bytes: float, most: int) -> int:
    """The parts, a power of two, in which the last pass takes a batch with so many bytes of logits."""
    parts = 1
    while logit_bytes > parts * LOGITS and parts * 2 <= most:
        parts *= 2
    return parts


def refit_parts(tokens: int, trained: float, most: int) -> int:
    """The number of parts, a power of two, in which a refit takes a batch. It follows from the work
    alone, so that results do not depend on the machine."""
    parts = min(most, max(int(6 * tokens * trained) // PART_WORK, 1))
    return 1 << (parts.bit_length() - 1)

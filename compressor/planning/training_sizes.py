"""How much of everything fits and healing take: what they share with their forecasts, without torch."""

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


def last_pass_bytes(weights: int, widths: int, tokens: int, logit_bytes: int) -> float:
    """Of a GPU, for the last pass at the most: `weights` of the dense blocks that are trained, with
    state, activations of a batch's `tokens` in all layers' `widths`, and logits of so many bytes a
    token."""
    logits = KINDS * min(tokens * logit_bytes, 2 * LOGITS)
    return TRAINED * weights + SINGLE * 2 * tokens * widths + logits


def logit_parts(logit_bytes: float, most: int) -> int:
    """Into how many parts, a power of two, the last pass splits a batch with such logits."""
    parts = 1
    while logit_bytes > parts * LOGITS and parts * 2 <= most:
        parts *= 2
    return parts


def refit_parts(tokens: int, trained: float, most: int) -> int:
    """Into how many parts, a power of two, a refit splits a batch: by the work alone."""
    parts = min(most, max(int(6 * tokens * trained) // PART_WORK, 1))
    return 1 << (parts.bit_length() - 1)

"""Trains a small mixture of experts of Qwen3-MoE's type on a text, to measure compressions with.

    python scripts/train_mixture.py TOKENIZER TEXT... -o FOLDER --minutes 4

TOKENIZER is a folder with a tokenizer, such as that of `mini-llama`; a text may be packed by xz. The
model has 6 layers of 16 experts, of which a token chooses 4: 20 million parameters. Its loss on windows
that it is not trained on is printed every half minute, and what was best on them is written.
"""

from __future__ import annotations

import argparse
import lzma
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

WINDOW = 512
RATE, WARM_UP = 2e-3, 0.03
JUDGED, EVERY = 128, 30.0  # windows of the held-out text, and seconds between looks at them


def read(path: Path) -> str:
    """The text in a file, plain or in xz."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()


def windows(tokenizer: str, texts: list[Path]) -> torch.Tensor:
    """All texts as windows of tokens [n, w]."""
    encode = AutoTokenizer.from_pretrained(tokenizer)
    parts = [part for path in texts for part in read(path).split("\n\n")]
    ids = [token for each in encode([f"{part}\n\n" for part in parts])["input_ids"] for token in each]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def made(tokenizer: str) -> Qwen3MoeForCausalLM:
    """The model with random weights, on the GPU if there is one."""
    vocabulary = len(AutoTokenizer.from_pretrained(tokenizer))
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=384, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, norm_topk_prob=True, tie_word_embeddings=True,
        max_position_embeddings=1024, output_router_logits=True, router_aux_loss_coef=0.01,
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def loss_on(model: Qwen3MoeForCausalLM, ids: torch.Tensor, batch: int) -> float:
    """The mean loss of a token of the windows, without what balances the router."""
    total = 0.0
    for rows in ids.to(model.device).split(batch):
        logits = model(input_ids=rows, output_router_logits=False).logits[:, :-1]
        wanted = rows[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), wanted, reduction="sum"
        ).item()
    return total / ids[:, 1:].numel()


def train(
    model: Qwen3MoeForCausalLM, ids: torch.Tensor, held: torch.Tensor, seconds: float, batch: int
) -> None:
    """Train for so long, at a rate that rises and then falls to 0. The model computes in its bfloat16;
    AdamW moves copies in float32. The copies that were best on `held` end in the model."""
    moved = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in moved]
    optimizer = torch.optim.AdamW(masters, RATE, betas=(0.9, 0.95), weight_decay=0.1)
    best, kept = float("inf"), masters
    started, step, shown = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(done / WARM_UP, (1 - done) / (1 - WARM_UP), 1)
        rows = ids[torch.randint(len(ids), (batch,))].to(model.device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        for master, p in zip(masters, moved, strict=True):
            master.grad, p.grad = None if p.grad is None else p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(moved, masters)
        step += 1
        if time.monotonic() - shown > EVERY:
            shown = time.monotonic()
            found = loss_on(model, held, batch)
            said = f"{shown - started:6.1f} s, step {step}, loss {loss.item():.3f}, held out {found:.3f}"
            print(said, flush=True)
            if found < best:
                best, kept = found, [master.detach().clone() for master in masters]
    if loss_on(model, held, batch) > best:
        with torch.no_grad():
            torch._foreach_copy_(moved, kept)
    print(f"{step} steps, held out {loss_on(model, held, batch):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--held-out", type=Path)
    asked = parser.parse_args()
    set_seed(0)
    model = made(asked.tokenizer)
    ids = windows(asked.tokenizer, asked.texts)
    if asked.held_out:
        held = windows(asked.tokenizer, [asked.held_out])[:JUDGED]
    else:
        ids, held = ids[:-JUDGED], ids[-JUDGED:]
    train(model, ids, held, 60 * asked.minutes, asked.batch)
    model.config.output_router_logits = False
    model.save_pretrained(asked.output)
    AutoTokenizer.from_pretrained(asked.tokenizer).save_pretrained(asked.output)


if __name__ == "__main__":
    main()

"""The structured layers and models, and the file that travels. Importing it calls `register`, as scripts
for version 0.1 expect. New ones call it themselves."""

from functools import cache


@cache
def register() -> None:
    """Let transformers and peft take structured checkpoints, once for this process. From then on
    ``AutoModelForCausalLM.from_pretrained(OUT)`` loads outputs of blr without remote code, as classes
    with kernels, and LoRA of peft, whenever that is imported, takes structured layers."""
    from blr.compressor.modeling.after_import import after_import
    from blr.compressor.modeling.registry import register_on_demand

    after_import("peft", _register_lora)
    register_on_demand()


def _register_lora() -> None:
    from blr.compressor.integrations.peft import register as register_lora

    register_lora()


register()

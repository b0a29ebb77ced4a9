"""What a process does once for the many commands that it forks: most of what each would cost."""

from __future__ import annotations


def warm_up() -> None:
    """Import what most commands import, and make the files that travel."""
    import torch
    import transformers.generation.utils
    import transformers.models.llama.modeling_llama  # noqa: F401

    import blr.compressor.cli
    import blr.compressor.compress
    import blr.compressor.evaluate
    import blr.compressor.export.export
    import blr.compressor.fitting.factorize
    import blr.compressor.generate
    import blr.compressor.loading.load
    import blr.compressor.loading.vendor
    import blr.compressor.modeling.exported
    import blr.compressor.output.check
    import blr.compressor.output.produce
    import blr.compressor.planning.plan

    torch.set_num_threads(1)
    blr.compressor.loading.vendor.vendored_files()

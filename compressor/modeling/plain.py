"""Models whose low-rank layers are pairs of `nn.Linear`, for tools that look for those.

Shipped in what ``blr export --as plain`` writes, where `auto_map` names this module.
"""

from __future__ import annotations

from typing import Any

from blr.compressor.modeling.classes import NestedMixin, made_class, table_plan
from blr.compressor.modeling.configuration_blr import PREFIX
from blr.compressor.modeling.pairs import pair_plan, place_pairs


class PlainModelMixin(NestedMixin):
    """Puts the pairs in their places in the last step of a model's construction, where transformers
    has filled nothing yet."""

    def post_init(self: Any) -> None:
        native: Any = super()
        if self.is_outermost:
            place_pairs(self)
        native.post_init()
        if self.is_outermost:
            self._tp_plan = {**table_plan(self), **pair_plan(self)}


def model_class(name: str) -> type[Any]:
    """The model class ``Blr<Native>`` with pairs."""
    return made_class(name, PlainModelMixin, __name__)


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return model_class(name)

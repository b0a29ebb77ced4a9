"""Lists the layers that an export packs, as entries of a layer table, without torch."""

from collections.abc import Collection, Mapping, Sequence

from blr.compressor.structures.specs import DenseSpec, QuantizedSpec

Entries = dict[str, dict[str, object]]


def packed_entries(
    layers: Entries, bits: int, plain: Collection[str], dense: Mapping[str, Sequence[int]], head: Entries
) -> Entries:
    """The entry of every layer that an export packs, by module. Layers that were in few bits before are
    not among them.

    Args:
        layers: the table of the compressed checkpoint. bits: of a packed weight, 0 for a head alone.
        plain: modules that packing makes no smaller. dense: module to the shape [out, in] of its weight.
        head: entry of the output head, if it is packed by itself.
    """
    if not bits:
        return head
    kept = {
        n: spec for n, spec in layers.items() if n not in plain and {"bits", "base"}.isdisjoint(spec)
    }
    structured = {name: {**spec, "bits": bits} for name, spec in kept.items()}
    weights = {n: QuantizedSpec(DenseSpec(i, o), bits).to_dict() for n, (o, i) in dense.items()}
    return {**structured, **weights, **head}

"""Shows a plan in numbers: parameters, bytes and predicted times of every layer, as JSON or a table."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from blr.compressor.base.tables import aligned
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.planning.roofline import ASKED, DECODE, PREFILL, Gpu, layer_time
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.specs import DenseSpec

EXPERT = re.compile(r"^(.+\.experts\.\w+\.)(\d+)$")  # the name of an expert's layer, its number behind
SUMMED = (
    *("dense_parameters", "parameters", "bytes", "decode_us", "prefill_us"),
    *("dense_decode_us", "dense_prefill_us"),
)
COLUMNS = (
    *("layers", "structure", "shape", "rank or pattern", "parameters in all", "cf", "bits"),
    *("bytes in all", "decode, µs each", "prefill, µs each", "rule"),
)


def plan_result(plan: Plan, recipe: Recipe, gpu: Gpu, name: str, outlined: bool) -> dict[str, Any]:
    """`plan` as JSON-ready data. Times are bf16 rooflines on `gpu`, beside dense ones. `outlined`:
    shapes come from config.json alone, so the whole model's size is unknown."""
    own = [recipe.settings_for(planned.layer.module) for planned in plan.layers]
    sized_by_cf = recipe.sized_by_cf and any(s.rank is None and s.pattern is None for s in own)
    layers = [_row(entry, gpu) for entry in sorted([*plan.layers, *plan.kept], key=_in_order)]
    totals = {key: sum(layer[key] for layer in layers) for key in SUMMED}
    return {
        "model": name,
        "from": "config.json" if outlined else "headers",
        "gpu": {"name": gpu.name, "source": gpu.source},
        "requested_cf": recipe.cf if sized_by_cf else None,
        "cf": plan.cf,
        "bits": plan.bits,
        "replaced": len(plan.layers),
        "kept_dense": len(plan.kept),
        "totals": totals,
        "whole": _whole(plan, layers),
        "layers": layers,
        "notes": plan.notes,
    }


def _in_order(entry: PlannedLayer) -> list[tuple[int, str]]:
    """Sorts block 2 before block 10."""
    parts = re.split(r"(\d+)", entry.layer.module)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _whole(plan: Plan, layers: Sequence[dict[str, object]]) -> dict[str, object] | None:
    """The whole checkpoint: its size, and the `share` of its parameters that is replaced."""
    if plan.whole is None:
        return None
    before = plan.whole.nbytes
    replaced = sum(planned.layer.entry.nbytes for planned in plan.layers)
    after = before - replaced + sum(planned.bits for planned in plan.layers) // 8
    return {
        "parameters": plan.whole.parameters,
        "share": plan.share,
        "bytes": before,
        "bytes_after": after,
        "factor": before / after,
    }


def _row(entry: PlannedLayer, gpu: Gpu) -> dict[str, Any]:
    layer, spec = entry.layer, entry.spec
    o, i = layer.shape
    dense = [layer_time(DenseSpec(i, o), tokens, gpu) for tokens in (DECODE, PREFILL)]
    times = [layer_time(spec, tokens, gpu) for tokens in (DECODE, PREFILL)]
    return {
        "module": layer.module,
        "type": layer.type,
        "structure": spec.structure,
        "shape": [o, i],
        "rank": spec.describe(),
        "dense_parameters": o * i,
        "parameters": spec.parameters,
        "cf": o * i / spec.parameters,
        "bits": entry.bits / (o * i),
        "bytes": entry.bits // 8,
        **{"decode_us": times[0], "prefill_us": times[1]},
        **{"dense_decode_us": dense[0], "dense_prefill_us": dense[1]},
        "rule": entry.rule,
    }


def plan_text(result: dict[str, Any], every: bool = False) -> str:
    """The table as aligned text: one row for the same layer in several blocks, or for `every` layer."""
    groups = [[layer] for layer in result["layers"]] if every else _grouped(result["layers"])
    lines = [aligned([COLUMNS, *(_cells(group) for group in groups)], numbers=range(4, 8))]
    totals, gpu = result["totals"], result["gpu"]
    chosen = f"; {gpu['chosen']}" if gpu.get("chosen", ASKED) != ASKED else ""
    experts = ", all experts among them," * any(EXPERT.match(x["module"]) for x in result["layers"])
    kept = f", {result['kept_dense']} kept dense" if result["kept_dense"] else ""
    lines += [
        f"{result['replaced']} layers replaced{kept}: {totals['dense_parameters']:,} -> "
        f"{totals['parameters']:,} parameters, {_sizes(result)}, {totals['bytes']:,} bytes",
        f"times on {gpu['name']} ({gpu['source']} ceilings, bf16 rooflines{chosen}): decode of "
        f"these layers{experts} {totals['decode_us']:,.0f} µs a token "
        f"(dense {totals['dense_decode_us']:,.0f}), prefill of {PREFILL} tokens "
        f"{totals['prefill_us'] / 1000:,.1f} ms (dense {totals['dense_prefill_us'] / 1000:,.1f})",
    ]
    if whole := result["whole"]:
        lines.insert(
            2,
            f"whole model: {whole['share']:.1%} of {whole['parameters']:,} parameters replaced, "
            f"{whole['bytes']:,} -> {whole['bytes_after']:,} bytes, factor {whole['factor']:.3f}",
        )
    if result["from"] == "config.json":
        lines.append("shapes are those that config.json implies: no weights were found")
    lines += [result[step]["said"] for step in ("compress", "heal") if step in result]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def _sizes(result: dict[str, Any]) -> str:
    asked = f" (asked for {result['requested_cf']:g})" if result["requested_cf"] else ""
    fewer = f"{result['cf']:.3f} times fewer{asked}, " if result["cf"] > 1 or asked else ""
    return f"{fewer}{result['bits']:.3f} bits a weight"


def _grouped(layers: Sequence[dict[str, Any]]) -> list[list[dict[str, object]]]:
    """Layers that differ only in the number of their block, or of an expert, together."""
    groups: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for layer in layers:
        name = re.sub(r"\d+", "#", EXPERT.sub(r"\1#", layer["module"]), count=1)
        key = (name, layer["structure"], layer["rank"], *layer["shape"], layer["rule"])
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def _cells(group: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    one = group[0]
    return (
        _label([layer["module"] for layer in group]),
        one["structure"],
        f"{one['shape'][0]}x{one['shape'][1]}",
        one["rank"],
        f"{sum(layer['parameters'] for layer in group):,}",
        f"{one['cf']:.3f}",
        f"{one['bits']:.3f}",
        f"{sum(layer['bytes'] for layer in group):,}",
        f"{one['decode_us']:.1f} (dense {one['dense_decode_us']:.1f})",
        f"{one['prefill_us']:.0f} (dense {one['dense_prefill_us']:.0f})",
        one["rule"],
    )


def _label(names: Sequence[str]) -> str:
    """``model.layers.0-31.mlp.up_proj`` for modules that differ in their first number or expert."""
    if len(names) == 1:
        return names[0]
    experts = {int(found[2]) for name in names if (found := EXPERT.match(name))}
    first = {int(found[0]) for name in names if (found := re.search(r"\d+", name))}
    label = EXPERT.sub(lambda found: found[1] + _runs(experts), names[0])
    return re.sub(r"\d+", _runs(first), label, count=1)


def _runs(numbers: Collection[int]) -> str:
    """``0-3,5`` of the numbers 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

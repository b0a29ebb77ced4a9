"""Tasks of lm-evaluation-harness on a loaded decoder (extra `eval`)."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import HubError, InputError
from blr.compressor.base.exhaustion import check_packages, raise_exhausted
from blr.compressor.base.quoting import named_line, quote
from blr.compressor.recipe.settings import EvalSettings


@dataclass(frozen=True)
class Scores:
    """Metrics by task, documents asked, examples in prompts, and lm_eval's version."""

    tasks: dict[str, dict[str, float]]
    samples: dict[str, int]
    shots: dict[str, int]
    harness: str


Items = dict[str, dict[str, float]]  # by task and item what the first metric of the task gave it


def compared(found: tuple[Scores, Items], dense: tuple[Scores, Items]) -> dict[str, object]:
    """By task: the scores of the dense model, the percentage of each that is recovered (if it is not
    0), and how many items score less than by the dense model (`lost`), and more (`gained`)."""
    wanted = dense[0].tasks
    recovery = {
        task: {n: 100 * v / wanted[task][n] for n, v in metrics.items() if wanted[task].get(n)}
        for task, metrics in found[0].tasks.items()
    }
    gaps = {
        task: [value - dense[1][task][item] for item, value in items.items()]
        for task, items in found[1].items()
    }
    lost = {task: sum(gap < 0 for gap in every) for task, every in gaps.items()}
    gained = {task: sum(gap > 0 for gap in every) for task, every in gaps.items()}
    return {"dense": wanted, "recovery": recovery, "lost": lost, "gained": gained}


def check_installed() -> None:
    check_packages("--tasks", "lm_eval", extra="eval")


def run_tasks(model: object, tokenizer: object, asked: EvalSettings) -> tuple[Scores, Items]:
    """Score a causal model, and its items if they are compared with a dense model's. Raises
    CapabilityError without lm_eval, InputError for unknown or broken tasks, HubError without data."""
    check_installed()
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    names, manager = asked.task_names, _manager(asked.task_names, asked.tasks_path)
    subject: object = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=asked.batch)
    items = asked.against is not None
    options = {"num_fewshot": asked.shots, "limit": asked.limit, "log_samples": items}
    try:
        found = lm_eval.simple_evaluate(
            subject, tasks=names, task_manager=manager, bootstrap_iters=0, **options
        )
    except OSError as error:  # of the hub and of datasets too
        remedy = "check the network, or run once with it: data sets are cached"
        raise HubError(f"{', '.join(names)}: no data ({named_line(error)}); {remedy}") from error
    except Exception as error:  # a task is a program
        raise_exhausted(error)
        remedy = "check the task's file and data"
        raise InputError(f"{', '.join(names)}: {named_line(error)}; {remedy}") from error
    tasks = {
        task: {
            key.removesuffix(",none").replace(",", "_"): float(value)
            for key, value in row.items()
            if isinstance(value, int | float) and "," in key and "_stderr" not in key
        }
        for task, row in found["results"].items()
    }
    samples = {task: int(n["effective"]) for task, n in (found.get("n-samples") or {}).items()}
    shots = {task: int(n) for task, n in (found.get("n-shot") or {}).items()}
    logged = {task: _items(rows) for task, rows in (found.get("samples") or {}).items()}
    return Scores(tasks, samples, shots, lm_eval.__version__), logged


def _items(logged: list[dict[str, Any]]) -> dict[str, float]:
    """By document and filter what a task's first metric gave, if that is a number."""
    first = {f"{row['doc_id']} {row['filter']}": row.get(row["metrics"][0]) for row in logged}
    return {item: float(value) for item, value in first.items() if isinstance(value, int | float)}


def _manager(names: list[str], path: Path | None) -> object:
    """What finds the tasks; those of the harness, a long list, only if `path` has not all."""
    from lm_eval.tasks import TaskManager

    if path is not None and not path.is_dir():
        raise InputError(f"{path}: no such folder; expected one of task files (YAML)")
    include = str(path) if path else None
    for defaults in (False, True) if path else (True,):
        manager = TaskManager(include_path=include, include_defaults=defaults)
        missing = [name for name in names if not manager.match_tasks([name])]
        if not missing:
            return manager
    raise InputError(
        f"{quote(missing, 160)[1:-1]}: no such task; expected names of lm_eval (`lm_eval ls tasks`) "
        "or of files in --tasks-path"
    )

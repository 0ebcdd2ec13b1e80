"""What benchmarks print and save: percentiles under vLLM's field names, aligned rows, JSON files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["PERCENTAGES", "latency_fields", "percentiles", "print_rows", "print_title", "write_json"]

PERCENTAGES = (10, 25, 50, 75, 90, 99)
WIDTH = 50


def percentiles(values: Sequence[float], percentages: Sequence[float] = PERCENTAGES) -> dict[str, float]:
    """Percentage -> value, interpolated linearly; zeros if there are no values."""
    found = np.percentile(values or [0.0], list(percentages)).tolist()
    return {f"{percentage:g}": value for percentage, value in zip(percentages, found, strict=True)}


def latency_fields(name: str, values_s: Sequence[float], percentages: Sequence[float]) -> dict[str, float]:
    """mean_, median_, std_ and p*_ fields of one latency, in milliseconds."""
    values_ms = np.asarray(values_s or [0.0]) * 1000
    fields = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    tails = percentiles(values_ms.tolist(), percentages)
    return fields | {f"p{percentage}_{name}_ms": value for percentage, value in tails.items()}


def print_title(text: str, fill: str = "=") -> None:
    print(f" {text} ".center(WIDTH, fill) if text else fill * WIDTH)


def print_rows(rows: Mapping[str, float | int | str]) -> None:
    for label, value in rows.items():
        print(f"{label + ':':<40} {value:<10.2f}" if isinstance(value, float) else f"{label + ':':<40} {value:<10}")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=4) + "\n")

"""Tables that commands print at their end."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def summary_table(summary: dict[str, Any]) -> None:
    """Prints a run's summary."""
    table = Table(show_header=False, box=box.ROUNDED)
    table.add_column(style="dim")
    table.add_column(justify="right")
    cells = {
        "strategy": str(summary["strategy"]),
        "workers": str(summary["workers"]),
        "steps": f"{summary['steps']:,}",
        "epochs": f"{summary['epochs']:g}",
        "seconds": f"{summary['train_seconds']:.1f}",
        "train loss": _number(summary["train_loss"]),
        "val loss": _number(summary["val_loss"]),
        "val accuracy": _number(summary["val_accuracy"]),
        "best val loss": _best(summary),
        "model given back": _given_back(summary),
        "busy": f"{summary['busy']:.0%}",
        "bytes sent": size_text(summary["bytes_sent"]),
        "rounds": f"{summary['rounds']:,}",
        "lost": str(summary["workers_lost"]),
    }
    for name, value in cells.items():
        if value:
            table.add_row(name, value)
    console = Console()
    console.print(table)
    if summary.get("choice"):
        console.print(summary["choice"], style="dim", highlight=False)
    for name, why in (summary.get("passed_over") or {}).items():
        console.print(f"[yellow]checkpoint {name} was passed over:[/] {why}", highlight=False)
    for name, why in (summary.get("unwritten") or {}).items():
        console.print(f"[yellow]checkpoint {name} was not saved:[/] {why}", highlight=False)
    if summary.get("nonfinite"):
        left_out = (
            f"{summary['nonfinite']:,} times values that are not finite were left out: see non_finite in events.jsonl"
        )
        console.print(f"[yellow]{left_out}[/]", highlight=False)
    if summary.get("left_out"):
        console.print(f"[yellow]{_left_out(summary)}[/]", highlight=False)
    for said in summary.get("warnings") or ():
        console.print(f"[yellow]exchanging hurt:[/] {said}", highlight=False)


def _best(summary: dict[str, Any]) -> str:
    number = summary.get("best_evaluation")
    return "" if number is None else f"{_number(summary['best_val_loss'])} (evaluation {number})"


def _left_out(summary: dict[str, Any]) -> str:
    held = summary["validation_rows"] + summary["left_out"]
    return (
        f"validation metrics are of {summary['validation_rows']:,} of {held:,} rows: the rest was with workers "
        "that had left or were lost"
    )


def _given_back(summary: dict[str, Any]) -> str:
    if summary.get("best_evaluation") is None:
        return ""
    return "that of the best evaluation" if summary["model"] == "best" else "the last"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def size_text(size_bytes: float) -> str:
    """A size as people write it.

    >>> size_text(999), size_text(1_500_000)
    ('999 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"

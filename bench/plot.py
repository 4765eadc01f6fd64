"""Pictures of what bench/run.py has measured: how long answers take, what they cost, how costs grow.

It must not know how anything is measured. The one module that needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # files only, no display

from matplotlib import pyplot


def draw(curves: dict[str, Any], growth: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``bench-latency.svg``, ``bench-load.svg`` and ``bench-growth.svg``; return their paths.

    curves: as of `nri.curves`. growth: as of `growth.measure`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _latency(curves, folder / "bench-latency.svg"),
        _load(curves["load"], folder / "bench-load.svg"),
        _growth(growth, folder / "bench-growth.svg"),
    ]


def _latency(curves: dict[str, Any], path: Path) -> Path:
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True)
    for axis, scenario in zip(axes, ("unannotated", "names", "edits"), strict=True):
        for plugin, percentiles in curves[scenario].items():
            axis.plot(percentiles, range(len(percentiles)), label=plugin)
        axis.set(title=scenario, xscale="log", xlabel="µs until the answer is read")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("per cent of the answers")
    return _save(figure, path)


def _load(load: list[dict[str, Any]], path: Path) -> Path:
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4))
    rates = [point["rate"] for point in load]
    for axis, key, title in zip(axes, ("p50", "cpu"), ("p50", "CPU of an answer"), strict=True):
        for plugin, label in (("names", "ours"), ("floor", "floor")):
            axis.plot(rates, [point[plugin][key] for point in load], marker="o", label=label)
        axis.set(title=title, xscale="log", xlabel="requests a second", ylabel="µs", ylim=(0, None))
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    return _save(figure, path)


def _growth(growth: dict[str, Any], path: Path) -> Path:
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for what, result in growth.items():
        sizes = [int(size) for size in result["µs"]]
        axis.plot(sizes, list(result["µs"].values()), marker="o", label=f"{what} ({result['median']:.2f})")
    axis.set(xscale="log", yscale="log", xlabel="how many", ylabel="µs", title="growth (exponent)")
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.legend(fontsize="small")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path

"""Renews the pictures of the examples: `python docs/gallery.py [NAME ...]`.

Each example runs in a process of its own, with smaller data than by default for some. The pictures
show what it returned, printed, or got from `bj.run`.
"""

import contextlib
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import beamjax as bj

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "examples"))
INK, GREY, FIRST, SECOND = "#1b2026", "#56606b", "#0072b2", "#d55e00"
DARK = {INK: "#e4eaf0", GREY: "#9ca9b6", FIRST: "#56b4e9", SECOND: "#e69f00"}


@dataclass
class Ran:
    """What an example did: its module, what it returned and printed, and the results of `run`."""

    module: ModuleType
    returned: Any
    printed: str
    results: list[tuple[tuple[Any, ...], Any]]  # arguments and result, in order

    def numbers(self, pattern: str) -> list[float]:
        return [float(x) for x in re.findall(pattern, self.printed, re.M)]


def ran(name: str, *flags: str) -> Ran:
    module = importlib.import_module(name)
    results, run = [], bj.run

    def recorded(fn: Any, *args: Any, **more: Any) -> Any:
        result = run(fn, *args, **more)
        # Placed results lose their files when the example ends.
        results.append((args, jax.tree.map(np.asarray, result)))
        return result

    bj.run, printed = recorded, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            returned = module.main(list(flags))
    finally:
        bj.run = run
    return Ran(module, returned, printed.getvalue(), results)


PICTURES: dict[str, Callable[[Axes], None]] = {}


def picture(draw: Callable[[Axes], None]) -> Callable[[Axes], None]:
    PICTURES[draw.__name__] = draw
    return draw


def curve(ax: Axes, values: Any, x: str, y: str, color: str = FIRST, label: str = "") -> None:
    ax.plot(np.arange(1, len(values) + 1), values, "o-", color=color, label=label, ms=3)
    ax.set(xlabel=x, ylabel=y)


@picture
def federated_digits(ax: Axes) -> None:
    found = ran("federated_digits", "--rounds=10", "--runner=local")
    curve(ax, found.numbers(r"accuracy .* ([\d.]+)%$"), "round", "accuracy, %")


@picture
def monte_carlo(ax: Axes) -> None:
    counts = [10**k for k in range(3, 7)]
    all_found = [ran("monte_carlo", f"--paths={n}", "--runner=local") for n in counts]
    prices = [found.returned["price"][0] for found in all_found]
    errors = [found.numbers(r"error of the price: ([\d.]+)$")[0] for found in all_found]
    ax.axhline(all_found[0].returned["price"][1], color=GREY, lw=1, ls="--")
    ax.errorbar(counts, prices, errors, fmt="o", color=FIRST, ms=4, capsize=3)
    ax.set(xscale="log", xlabel="paths", ylabel="price, and the formula's")


@picture
def corpus_pca(ax: Axes) -> None:
    x, y, color = ran("corpus_pca", "--gigabytes=0.01", "--runner=local").results[-1][1].T
    ax.scatter(x, y, c=color, s=4, cmap="viridis", rasterized=True, lw=0)
    ax.set(xlabel="first axis", ylabel="second axis")


@picture
def federated_table(ax: Axes) -> None:
    flags = "--rows=50_000", "--clients=2_000", "--cohort=400", "--rounds=8", "--runner=local"
    losses = ran("federated_table", *flags).numbers(r"loss ([\d.]+)")
    curve(ax, losses, "round, 400 of 2,000 clients each", "loss")


@picture
def cohorts_by_index(ax: Axes) -> None:
    history = ran("cohorts_by_index", "--rounds=40", "--runner=local").results[0][1][1]
    curve(ax, history["loss"], "round, 50 of 5,000 clients each", "loss")


@picture
def kmeans_digits(ax: Axes) -> None:
    centres, inertia, _ = ran("kmeans_digits", "--runner=local").results[0][1]
    best = np.pad(centres[np.argmin(inertia)].reshape(2, 5, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])
    ax.imshow(np.concatenate(np.concatenate(best, axis=1), axis=1), cmap="gray_r")
    ax.set(xticks=[], yticks=[], xlabel="the ten centres")
    ax.grid(visible=False)


@picture
def self_tuning_rate(ax: Axes) -> None:
    losses = ran("self_tuning_rate", "--runner=local").returned
    curve(ax, losses, "step of the two rates", "loss on held-out digits")


@picture
def clustered_clients(ax: Axes) -> None:
    found = ran("clustered_clients", "--runner=local")
    losses = np.array([r[1] for _, r in found.results if isinstance(r, tuple) and len(r) == 3])
    curve(ax, losses[:, 0], "round", "loss", FIRST, "first group")
    curve(ax, losses[:, 1], "round", "loss", SECOND, "second group, after the cut")
    ax.legend()


@picture
def diloco_text(ax: Axes) -> None:
    losses = ran("diloco_text", "--rounds=8", "--runner=local").returned
    curve(ax, losses, "round of 20 steps at 4 workers", "bits per byte")


@picture
def influence(ax: Axes) -> None:
    scores, truth = (1e3 * x for x in ran("influence", "--top=12", "--runner=local").returned)
    ends = np.array([min(scores.min(), truth.min()), max(scores.max(), truth.max())])
    ax.plot(ends, ends, color=GREY, lw=1, ls="--")
    ax.plot(truth, scores, "o", color=FIRST, ms=4)
    ax.set(xlabel="change of the loss without the patient, 1/1000", ylabel="influence score")


@picture
def resampling(ax: Axes) -> None:
    (_, (beta, error)), (_, betas), _ = ran("resampling", "--runner=local").results
    ax.hist(betas[:, 0], bins=24, color=FIRST, alpha=0.8)
    ax.axvspan(beta[0] - error[0], beta[0] + error[0], color=SECOND, alpha=0.25, lw=0)
    ax.axvline(beta[0], color=SECOND)
    ax.set(xlabel="coefficient: bootstrap, and its standard error", ylabel="samples")


@picture
def forgotten_patients(ax: Axes) -> None:
    first, second, _ = ran("forgotten_patients", "--runner=local").returned
    ax.barh(["after some withdrew", "first run"], [second, first], color=[SECOND, FIRST])
    ax.set(xlabel="shards computed")
    ax.grid(visible=False, axis="y")


@picture
def text_embeddings(ax: Axes) -> None:
    module = ran("text_embeddings").module
    texts, labels = module.passages()
    vectors = np.asarray(module.Embedder().apply(module.train(texts, labels, 30), texts))
    means = np.stack([vectors[labels == topic].mean(axis=0) for topic in range(module.TOPICS)])
    ax.imshow(means @ means.T, cmap="viridis")
    ax.set(xlabel="similarity of 30 topics", xticks=[], yticks=[])
    ax.grid(visible=False)


@picture
def own_pipeline(ax: Axes) -> None:
    solved, descended, truth = ran("own_pipeline").returned
    at = np.arange(len(truth))
    ax.bar(at - 0.2, solved, 0.4, color=FIRST, label="transform")
    ax.bar(at + 0.2, descended, 0.4, color=SECOND, label="run, 2,000 rounds")
    ax.plot(at, truth, "_", color=INK, ms=9, label="NumPy")
    ax.set(xlabel="weight", xticks=[])
    ax.legend()


@picture
def cnn_clients(ax: Axes) -> None:
    accuracies = ran("cnn_clients", "--rounds=8", "--runner=local").returned
    curve(ax, 100 * np.array(accuracies), "round", "accuracy, %")


@picture
def private_statistics(ax: Axes) -> None:
    found = ran("private_statistics", "--runner=local")
    private, true = found.returned
    names = re.findall(r"^(\w+) +[\d.-]+ +[\d.-]+$", found.printed, re.M)
    ax.bar(names, 100 * (private / true - 1), color=FIRST)
    ax.axhline(0, color=INK, lw=1)
    ax.set(ylabel="private over true mean, %")


@picture
def compressed_training(ax: Axes) -> None:
    for method, (accuracy, nbytes) in ran("compressed_training", "--runner=local").returned.items():
        ax.plot(nbytes, 100 * accuracy, "o", color=FIRST)
        at, shift = (nbytes, 100 * accuracy), (7, 0)
        ax.annotate(method, at, shift, textcoords="offset points", color=INK, va="center")
    ax.set(xscale="log", xlabel="bytes of an update", xlim=(400, 3e4), ylim=(80, 100))
    ax.set(ylabel="accuracy, %")


@picture
def budgeted_clients(ax: Axes) -> None:
    returned = ran("budgeted_clients", "--runner=local").returned
    for color, (name, accuracies) in zip((FIRST, SECOND), returned.items(), strict=True):
        curve(ax, 100 * np.array(accuracies), "round", "accuracy, %", color, name)
    ax.legend()


@picture
def four_devices(ax: Axes) -> None:
    found = ran("four_devices", "--runner=DirectRunner")
    ax.hist(found.results[1][1][2], bins=30, color=FIRST)
    ax.set(xlabel="probability for the patient left out", ylabel="patients", yscale="log")


def write(name: str) -> None:
    """Draws on a transparent paper, in colors that follow the theme of the reader."""
    mpl.rcParams |= {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "axes.grid": True,
        "grid.color": GREY, "grid.alpha": 0.25, "axes.spines.top": False,
        "axes.spines.right": False, "text.color": INK, "axes.labelcolor": INK,
        "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "legend.frameon": False,
    }  # fmt: skip
    figure, ax = plt.subplots(figsize=(4, 2.6), layout="constrained")
    PICTURES[name](ax)
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None}, dpi=90)
    rules = "".join(
        f"[style*='{kind}: {light}'] {{ {kind}: {dark} !important; }}\n"
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}}}</style>\n <defs>"
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text.getvalue())
    target = DOCS / "images" / "examples" / f"{name}.svg"
    target.write_text(svg.replace("<defs>", style, 1), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write(sys.argv[1])
    else:
        for example in sys.argv[1:] or PICTURES:
            subprocess.run([sys.executable, "-W", "ignore", __file__, example], check=True)

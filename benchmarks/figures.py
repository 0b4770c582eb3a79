"""The figures of docs/, drawn anew: each is a function that returns a matplotlib figure.

    python benchmarks/figures.py                   all of them, into docs/images/
    python benchmarks/figures.py theory-cvar       one of them
    python benchmarks/figures.py --folder DIR --format png

A new figure is a function and a row of FIGURES. What takes long is computed elsewhere and read from
benchmarks/results/. The same input gives the same bytes.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.files import read_json
from evenhand.theory.bias import empirical_cvar_bias
from evenhand.theory.consistency import top_minimiser
from evenhand.theory.cvar import cvar_curve
from evenhand.theory.order_weights import batch_weights, label_weights

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise SystemExit("figures need matplotlib: pip install 'evenhand[docs]'") from error

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
RESULTS = HERE / "results"
# Okabe and Ito's colours: told apart by all readers, in this order for what is ordered.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#666666",
)  # fmt: skip
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.facecolor": "white",  # readable on a dark page too
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9.5,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "evenhand",
}


def panels(columns: int, *, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.6 * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def weights_figure() -> Figure:
    """How much an example, or a label, of each rank weighs in the expected S2M loss (lemma 1)."""
    figure, (examples, labels) = panels(2)
    num_examples, batch_size = 1_000_000, 1024
    ranks = np.unique(np.geomspace(1, num_examples, 160).astype(int))
    for kept, colour in zip((1, 16, 128, 512, 1024), (RED, ORANGE, GREEN, BLUE, GREY), strict=True):
        weights = batch_weights(
            num_examples, batch_size=batch_size, num_hard_examples=kept, ranks=ranks
        )
        examples.plot(ranks / num_examples, weights * num_examples, color=colour, label=f"{kept}")
        examples.axvline(kept / batch_size, color=colour, linewidth=0.8, linestyle=":")
    examples.set(
        xscale="log",
        yscale="log",
        xlim=(1e-5, 1.3),
        ylim=(1e-3, 3e3),
        xlabel="rank of the example / N (hardest at the left)",
        ylabel="weight θ × N",
        title="Batches of 1,024 of a million examples\n(dotted: k′ / 1,024)",
    )
    examples.legend(title="k′ kept", loc="lower left")
    num_negatives, sampled = 100_000, 2048
    ranks = np.unique(np.geomspace(1, num_negatives, 160).astype(int))
    for kept, colour in zip((1, 32, 256, 2048), (RED, ORANGE, GREEN, GREY), strict=True):
        weights = label_weights(
            num_negatives, num_sampled_labels=sampled, num_hard_labels=kept, ranks=ranks
        )
        labels.plot(ranks / num_negatives, weights * num_negatives, color=colour, label=f"{kept}")
        labels.axvline(kept / sampled, color=colour, linewidth=0.8, linestyle=":")
    labels.set(
        xscale="log",
        yscale="log",
        xlim=(1e-5, 1.3),
        ylim=(1e-3, 5e3),
        xlabel="rank of the label / (K − 1) (highest score at the left)",
        ylabel="weight φ × (K − 1)",
        title="2,048 labels drawn of 100,000\n(dotted: k / 2,048)",
    )
    labels.legend(title="k kept", loc="lower left")
    return figure


def laws() -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """Discrete laws of a loss in [0, 1]: values, probabilities, colour."""
    grid = (np.arange(2000) + 0.5) / 2000
    even = np.full(2000, 1 / 2000)
    return {
        "uniform (a density)": (grid, even, BLUE),
        "skewed: cube of a uniform": (grid**3, even, GREEN),
        "0 or 1, P[1] = 0.1 (a gap)": (np.array([0.0, 1.0]), np.array([0.9, 0.1]), RED),
    }


def cvar_figure() -> Figure:
    """CVaR over its level for the law and for samples of it, and how fast the bias falls."""
    figure, (levels, rates) = panels(2, height=3.7)
    num_examples = 40
    fractions = np.arange(1, num_examples + 1) / num_examples
    sizes = np.array([10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120])
    for name, (values, probabilities, colour) in laws().items():
        exact = cvar_curve(values, fractions, probabilities=probabilities)
        bias = np.array(
            [
                empirical_cvar_bias(
                    values, probabilities, num_examples=num_examples, tail_fraction=fraction
                )
                for fraction in fractions
            ]
        )
        levels.plot(fractions, exact, color=colour)
        levels.plot(fractions, exact + bias, color=colour, linestyle="--")
        levels.fill_between(fractions, exact + bias, exact, color=colour, alpha=0.18, linewidth=0)
        biases = [
            -empirical_cvar_bias(values, probabilities, num_examples=int(n), tail_fraction=0.1)
            for n in sizes
        ]
        rates.plot(sizes, biases, color=colour, marker="o", markersize=3, label=name)
    atom = (np.array([0.0, 0.5, 1.0]), np.array([0.8, 0.18, 0.02]))
    biases = [-empirical_cvar_bias(*atom, num_examples=int(n), tail_fraction=0.1) for n in sizes]
    rates.plot(sizes, biases, color=PURPLE, marker="o", markersize=3, label="an atom across 0.1")
    levels.set(
        xlabel="level α",
        ylabel="CVaR",
        ylim=(0, 1.03),
        title="The law (line) and the mean of its samples of\n"
        f"N = {num_examples} (dashed): the shade is the bias",
    )
    for power, height, words in ((0.5, 2.4, "N$^{-1/2}$"), (1.0, 2.0, "N$^{-1}$")):
        rates.plot(sizes, height * sizes**-power, color=GREY, linewidth=0.9, linestyle=":")
        rates.annotate(words, (sizes[-1] * 1.1, height * sizes[-1] ** -power), color=GREY)
    rates.set(
        xscale="log",
        yscale="log",
        xlim=(8, 12_000),
        ylim=(1e-6, 1),
        xlabel="N, examples of a sample",
        ylabel="CVaR − mean empirical CVaR",
        title="The bias at α = 0.1: its rate is decided\nby the law near its quantile",
    )
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def consistency_figure() -> Figure:
    """True label probabilities and what the minimiser of the average top-k' loss makes of them."""
    figure, axes = panels(4, height=2.9)
    figure.set_size_inches(11.5, 2.9)
    probabilities = np.array([0.34, 0.2, 0.14, 0.1, 0.08, 0.06, 0.05, 0.03])
    edges = np.arange(len(probabilities) + 1) + 0.5
    for axis, alpha in zip(axes, (1.0, 0.8, 0.6, 0.3), strict=True):
        best = top_minimiser(probabilities, tail_fraction=alpha)
        collapsed = int(best.num_collapsed)
        axis.bar(np.arange(8) + 1, probabilities, width=1, color="#d9d9d9", label="p, the truth")
        axis.stairs(best.predictions, edges, color=BLUE, linewidth=2, label="g, the minimiser")
        if collapsed:
            axis.plot([0.5, collapsed + 0.5], [math.exp(-best.threshold)] * 2, color=RED, lw=2.4)
        axis.set(
            ylim=(0, 0.37),
            xticks=range(1, 9),
            xlabel="label",
            title=f"α = {alpha:g}: {collapsed} collapsed,\n⌊e$^{{t*}}$⌋ = {best.level}",
        )
        axis.grid(visible=False, axis="x")
    axes[0].set_ylabel("probability")
    axes[0].legend(loc="upper right")
    return figure


def sweep_figure() -> Figure:
    """What k' does to whom: annealed S2M on places, in points of recall@10 above SNM."""
    runs = read_json(RESULTS / "methods-sweep.json")["runs"]
    counts = sorted({run["num_hard_examples"] for run in runs})
    figure, (labels, groups) = panels(2)
    shown = [
        (labels, "recall@10 on head", "head", BLUE),
        (labels, "recall@10 on torso", "torso", GREEN),
        (labels, "recall@10 on tail", "tail", RED),
        (groups, "recall@10", "all", GREY),
        (groups, "recall@10 on worst tenth of country", "worst tenth of countries", ORANGE),
        (groups, "recall@10 on worst 3 of script", "worst 3 scripts", PURPLE),
    ]
    for axis, metric, label, colour in shown:
        values = {
            count: [run["test"][metric] for run in runs if run["num_hard_examples"] == count]
            for count in counts
        }  # a value a seed
        base = np.mean(values[counts[-1]])
        means = [100 * (np.mean(values[count]) - base) for count in counts]
        axis.plot(counts, means, color=colour, label=label)
        for count in counts:
            points = [100 * (value - base) for value in values[count]]
            axis.plot([count] * len(points), points, ".", color=colour, markersize=4)
    for axis, title in ((labels, "by how often a label is named"), (groups, "all, and the worst")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.set(title=title, xlabel="hardest examples that count, k' of 1,024")
        axis.legend()
    labels.set_ylabel("points of recall@10 above SNM")
    return figure


SPEED_COLOURS = {  # by the first word that a name holds: one way, one colour in every panel
    "evenhand": BLUE, "score product": GREY, "mined first": "black", "full softmax": RED,
    "SparseAdam": GREEN, "sparse": ORANGE, "": PURPLE,
}  # fmt: skip


def speed_figure() -> Figure:
    """Time of a step over the number of labels: one panel for each machine that was measured."""
    files = {"CPU": RESULTS / "speed-cpu.json", "GPU": RESULTS / "speed-gpu.json"}
    measured = {name: swept_rows(read_json(path)) for name, path in files.items() if path.exists()}
    if not measured:
        command = f"python benchmarks/cpu.py --sweep --json {files['CPU']}"
        raise SystemExit(f"no speed was measured yet: {command}")
    figure, axes = panels(len(measured), height=4.4)
    figure.set_size_inches(6.6 * len(measured), 4.4)
    for axis, rows in zip(axes, measured.values(), strict=True):
        lines = {
            name: sorted(
                (row["labels"], row["milliseconds"]) for row in rows if row["name"] == name
            )
            for name in dict.fromkeys(row["name"] for row in rows)
        }
        for name, points in lines.items():
            is_ours, is_floor = name.startswith("evenhand"), name.startswith("score product")
            axis.plot(
                *zip(*points, strict=True),
                label=name,
                color=next(colour for word, colour in SPEED_COLOURS.items() if word in name),
                marker="o",
                markersize=4.5 if is_ours else 3,
                linewidth=2.6 if is_ours else 1.3,
                linestyle=":" if is_floor else "--" if "SNM" in name else "-",
            )
        axis.set(xscale="log", yscale="log", ylabel="milliseconds a step")
        axis.set_xlabel("labels (a line ends where memory or patience does)")
        axis.yaxis.set_major_formatter("{x:,g}")
        label_line_ends(axis, lines)
        row = rows[0]
        axis.set_title(
            f"{row['device']}\nbatch {row['batch_size']:,}, {row['sampled']:,} labels sampled, "
            f"k {row['hard_labels']}, k′ {row['hard_examples']}, width {row['dim']}",
            loc="left",
        )
    return figure


def label_line_ends(axis: Axes, lines: dict[str, list[tuple[float, float]]]) -> None:
    """Names at the right of the lines' ends, moved up or down where one would cover another."""
    height = 0.11  # of a name, in powers of ten
    taken: list[tuple[float, float]] = []  # (first x, y) of names already there, as logarithms
    for name, points in sorted(lines.items(), key=lambda item: (-item[1][-1][0], item[1][-1][1])):
        x, y = np.log10(points[-1])
        passing = [
            np.interp([x, x + 1], *np.log10(others).T)
            for others in lines.values()
            if others[-1][0] > points[-1][0]
        ]  # lines that go on where this one ends, here and as far as its name may reach
        shifts = [sign * step * height / 2 for step in range(20) for sign in (1, -1)]
        free = (
            y + shift
            for shift in shifts
            if all(abs(y + shift - other) >= height for at, other in taken if at == x)
            and not any(
                min(ys) < y + shift + height and y + shift < max(ys) + height for ys in passing
            )
        )
        place = next(free, y)
        taken.append((x, place))
        axis.annotate(
            name,
            (10 ** (x + 0.07), 10**place),
            va="center",
            fontsize="small",
            fontweight="bold" if name.startswith("evenhand") else "normal",
            color=next(line.get_color() for line in axis.lines if line.get_label() == name),
            annotation_clip=False,
        )
    ends = [np.log10(points[-1][0]) for points in lines.values()]
    axis.set_xlim(right=10 ** (max(ends) + 0.1))


def swept_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the width that was measured at most numbers of labels."""
    counts: dict[int, set[int]] = {}
    for row in rows:
        counts.setdefault(row["dim"], set()).add(row["labels"])
    width = max(counts, key=lambda dim: len(counts[dim]))
    return [row for row in rows if row["dim"] == width]


FIGURES: dict[str, Callable[[], Figure]] = {
    "theory-weights": weights_figure,
    "theory-cvar": cvar_figure,
    "theory-consistency": consistency_figure,
    "methods-sweep": sweep_figure,
    "speed": speed_figure,
}


def save_figure(name: str, folder: Path, file_format: str) -> Path:
    path = folder / f"{name}.{file_format}"
    metadata = {"Date": None, "Creator": None} if file_format == "svg" else None
    with matplotlib.rc_context(STYLE):
        FIGURES[name]().savefig(path, metadata=metadata, dpi=110)
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws the figures of docs/.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    options = parser.parse_args(arguments)
    for name in options.names or FIGURES:
        if name not in FIGURES:
            parser.error(f"no figure is called {name!r}: they are {', '.join(FIGURES)}")
        print(save_figure(name, options.folder, options.format))


if __name__ == "__main__":
    main()

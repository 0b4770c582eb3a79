"""The tables of README.md and docs/results.md, from the committed results."""

from typing import Any

from markdown import read, share, table

MODELS = {"demo": "small model (16,384 n-gram vectors of 128)", "full": "full (1,048,576 of 512)"}
GROUPS = ("all", "worst 3 of script", "worst tenth of country", "head", "torso", "tail")
SHOWN = [(f"recall@{cutoff}", group) for cutoff in (10, 1, 50) for group in GROUPS]
README_SHOWN = [
    *(("recall@10", group) for group in ("all", "worst 3 of script", "head", "tail")),
    ("recall@1", "tail"),
]
WORDS = {
    "worst 3 of script": "worst 3 scripts",
    "worst tenth of country": "worst tenth of countries",
}


SPEED = [  # what it is called here, in the results of the GPU, and in those of the CPU
    ("the score product alone", "score product alone, CUDA graph", "score product alone"),
    ("**Evenhand, S²M**", "evenhand S2M step", "evenhand S2M step"),
    (
        "S²M in plain PyTorch: mine first, autograd over the survivors (GPU: as a CUDA graph)",
        "mined first, autograd over the survivors, SGD, CUDA graph",
        "PyTorch mined first, then autograd over the survivors",
    ),
    (
        "S²M in plain PyTorch: shared negatives, autograd over all scores",
        "shared negatives, autograd, sparse SGD",
        "PyTorch shared negatives, sparse Adagrad",
    ),
    (
        "S²M in plain PyTorch: gathering the vectors of each example's sample",
        "obvious PyTorch: gather (B, M, D), autograd",
        None,
    ),
    (
        "**Evenhand, SNM**: no mining of examples",
        "evenhand SNM step, all examples",
        "evenhand SNM step",
    ),
    (
        "sentence-transformers, MultipleNegativesRankingLoss",
        None,
        "sentence-transformers MultipleNegativesRankingLoss",
    ),
    ("pytorch-metric-learning, BatchHardMiner", None, "pytorch-metric-learning BatchHardMiner"),
    ("TensorFlow Recommenders, hard negatives", None, "TensorFlow Recommenders, hard negatives"),
    ("full softmax", "full softmax, autograd, CUDA graph", "PyTorch full softmax"),
    (
        "full softmax, compiled",
        "full softmax, compiled, CUDA graph",
        "PyTorch full softmax, compiled",
    ),
]


def speed_table() -> list[str]:
    """Milliseconds of a step, and their ratio to the product, at 13,330 labels."""
    gpu, cpu = (
        {row["name"]: row for row in read(file) if (row["labels"], row["dim"]) == (13_330, 512)}
        for file in ("speed-gpu.json", "speed-cpu.json")
    )
    rows = [
        (title, _time(gpu, on_gpu, digits=3), _time(cpu, on_cpu, digits=0))
        for title, on_gpu, on_cpu in SPEED
    ]
    return table(("ms, over the product", "H200, bfloat16", "2 CPU cores, float32"), rows)


def _time(rows: dict[str, Any], name: str | None, *, digits: int) -> str:
    if name is None:
        return ""
    row = rows[name]
    return f"{row['milliseconds']:,.{digits}f}, {row['ratio_to_product']:,.1f}"


def places_table(methods: dict[str, str], shown: list[tuple[str, str]]) -> list[str]:
    """SNM beside other methods (name -> title): recall, and the difference to SNM in points."""
    lines = []
    for size, model in MODELS.items():
        differences = read(f"places-{size}-seeds.json")["differences"]
        for metric, group in shown:
            rows = [_row(differences[method], metric, group) for method in methods]
            head = f"**{model}**, " if (metric, group) == shown[0] else ""
            title = f"{head}{metric}, {WORDS.get(group, group)}"
            lines.append([title, share(rows[-1]["baseline"]), *map(_cell, rows)])
    return table(["", "SNM", *methods.values()], lines)


def _row(rows: list[dict[str, Any]], metric: str, group: str) -> dict[str, Any]:
    (found,) = (row for row in rows if (row["metric"], row["group"]) == (metric, group))
    return found


def _cell(row: dict[str, Any]) -> str:
    """Bold: the wider of the intervals over queries and over seeds does not hold 0."""
    low, high = min(row["low"], row["seed_low"]), max(row["high"], row["seed_high"])
    points = f"{100 * row['difference']:+.1f}; {100 * low:+.1f} to {100 * high:+.1f}"
    is_certain = low > 0 or high < 0
    return f"{share(row['contender'])} ({f'**{points}**' if is_certain else points})"


def readme_tables() -> dict[str, list[str]]:
    """The tables of README.md, by the mark that they stand under."""
    methods = {"s2m-annealed": "S²M, annealed", "s2m-even": "even-handed, the default"}
    return {"places": places_table(methods, README_SHOWN)}


def results_tables() -> dict[str, list[str]]:
    """The tables of docs/results.md, by the mark that they stand under."""
    methods = {
        "s2m": "S²M, Algorithm 1",
        "s2m-annealed": "S²M, annealed",
        "s2m-even": "even-handed, the default",
    }
    return {"places": places_table(methods, SHOWN), "speed": speed_table()}

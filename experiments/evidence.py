"""Whether variants of a sweep differ: paired differences over seeds, with intervals and a picture.

    python -m experiments.evidence sweeps/ea --question EA,none
    python -m experiments.evidence experiments/results/evidence/cifar10-runs.csv --question EA,none -o evidence

Top-1 is that of the last epoch's weights, on the test images where the runs were tested. Differences are taken seed by
seed; intervals (95%) and p values (two-sided) are those of Student's paired t test. `--question A,B` is asked before
the runs: is A better than B? Its p stands as it is; those of all other pairs are corrected for their number (Holm).

Sources are sweeps' folders or files of runs; several are read as one. Written: evidence-runs.csv (a row a run), which
can be given in place of the folder, evidence.csv, .md and .png.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from statsmodels.stats.power import TTestPower

from ea_vision.base.errors import UsageError, exit_code

COLUMNS = [
    "variant",
    "seed",
    "top1",
    "train_loss",
    "seconds",
    "images",
    "updates",
    "data",
    "options",
]
# Options that do not belong to the experiment: where and how fast it runs, what it writes besides.
IGNORED = {
    "about",
    "data_dir",
    "output",
    "resume",
    "seed",
    "workers",
    "device",
    "download",
    "recipe",
    "channels_last",
    "compile",
    "compile_mode",
    "eval_batch_size",
    "eval_epochs",
    "checkpoint_steps",
    "snapshot_epochs",
    "log_steps",
    "tensorboard",
    "max_bad_images",
    "train_beton",
    "val_beton",
}


def read_run(folder: Path) -> dict[str, Any]:
    """Return a finished run as a row: the columns, what it was evaluated on (split) and its options by name.

    Raises:
        UsageError: the run is not complete.
    """
    if not (folder / "results.json").is_file():
        raise UsageError(f"{folder} is not complete: the sweep's own command continues it")
    results = json.loads((folder / "results.json").read_text())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    metrics = pd.read_csv(folder / "metrics.csv")
    split = "test" if "test_last" in results else results["eval_split"]
    return {
        "seed": config["seed"],
        "top1": results[f"{split}_last"]["top1"],
        "train_loss": metrics["train_loss"].iloc[-1],
        "seconds": round(metrics["seconds"].sum()),
        "images": results.get(f"{split}_images"),
        "updates": int(metrics["step"].iloc[-1]),
        "data": config["about"]["data_fingerprint"],
        "split": split,
        "options": {key: value for key, value in config.items() if key not in IGNORED},
    }


def _of_folder(folder: Path, variants: Sequence[str] | None) -> pd.DataFrame:
    """Return the runs of a sweep's folder, in options those in which the variants differ.

    Raises:
        UsageError: none, one that is not complete, or runs of a variant with other options.
    """
    rows = []
    for path in sorted(folder.glob("variant=*,seed=*")):
        variant = path.name.removeprefix("variant=").rpartition(",seed=")[0]
        if variants is None or variant in variants:
            rows.append({"variant": variant, **read_run(path)})
    if not rows:
        raise UsageError(
            f"runs of `python -m experiments.sweep --variant ...` are required in {folder}, got none"
        )
    first: dict[str, dict] = {}
    for row in rows:
        of_variant = first.setdefault(row["variant"], row["options"])
        for key in (key for key in of_variant if row["options"].get(key) != of_variant[key]):
            raise UsageError(
                f"the runs of a variant must have equal options: {key} of {row['variant']} is "
                f"{of_variant[key]!r} and {row['options'].get(key)!r}"
            )
    keys = {
        key
        for options in first.values()
        for key, value in options.items()
        if value != rows[0]["options"].get(key)
    }
    for row in rows:
        row["options"] = " ".join(
            f"{key}={json.dumps(value, default=str)}".replace('"', "")
            for key, value in row["options"].items()
            if key in keys | {"model"}
        )
    return pd.DataFrame(rows)


def _of_file(path: Path) -> pd.DataFrame:
    """Return the runs of a file that `write_runs` wrote."""
    rows = pd.read_csv(path, keep_default_na=False, na_values={"images": "", "updates": ""})
    [top1] = [name for name in rows if name.endswith("_top1")]
    return rows.rename(columns={top1: "top1"}).assign(split=top1.removesuffix("_top1"))


def read_runs(*sources: Path, variants: Sequence[str] | None = None) -> pd.DataFrame:
    """Return the runs of sweeps: COLUMNS and split, in the order of `variants` (None: all, as they are read).

    Raises:
        UsageError: a source without runs, a variant that is missing, a run twice, or runs that cannot be compared: of
            other data, evaluated on other images, or of one variant with other numbers of updates.
    """
    runs = pd.concat(
        [
            _of_file(source) if source.is_file() else _of_folder(source, variants)
            for source in sources
        ]
    )
    runs = runs.reindex(columns=[*COLUMNS, "split"]).reset_index(drop=True)
    runs[["images", "updates"]] = runs[["images", "updates"]].astype("Int64")
    runs[["data", "options"]] = runs[["data", "options"]].astype(object).fillna("")
    if variants is not None:
        if lacking := [name for name in variants if name not in set(runs["variant"])]:
            raise UsageError(
                f"no runs of {', '.join(lacking)}; there are {', '.join(runs['variant'].unique())}"
            )
        runs = runs[runs["variant"].isin(variants)].sort_values(
            "variant", key=lambda names: names.map(list(variants).index), kind="stable"
        )
    for twice in runs[runs.duplicated(["variant", "seed"])].itertuples():
        raise UsageError(
            f"one run of each variant and seed is required, got two of {twice.variant}, seed {twice.seed}"
        )
    for what, values in (
        ("split", runs["split"]),
        ("data", runs["data"].str[:12].replace("", None)),
        ("number of images", runs["images"]),
    ):
        if values.nunique() > 1:
            raise UsageError(
                f"all runs must have the same {what}, got {', '.join(map(str, values.dropna().unique()))}"
            )
    for name, updates in runs.groupby("variant")["updates"]:
        if updates.nunique() > 1:
            raise UsageError(
                f"the runs of a variant must be equally long, got {name} with "
                f"{' and '.join(map(str, updates.unique()))} updates"
            )
    return runs


def write_runs(runs: pd.DataFrame, path: Path) -> None:
    """Write runs as a file that `read_runs` takes."""
    split = runs["split"].iloc[0]
    runs[COLUMNS].rename(columns={"top1": f"{split}_top1"}).to_csv(path, index=False)


def by_variant(runs: pd.DataFrame) -> pd.DataFrame:
    """Return top-1 in percent, a row a seed and a column a variant.

    Raises:
        UsageError: a seed that one variant has and another lacks.
    """
    table = runs.pivot(index="seed", columns="variant", values="top1")[
        list(runs["variant"].unique())
    ]
    lacking = [
        f"{name}: {', '.join(map(str, table.index[table[name].isna()]))}"
        for name in table
        if table[name].isna().any()
    ]
    if lacking:
        raise UsageError(
            f"the variants must have the same seeds; seeds that are missing: {'; '.join(lacking)}"
        )
    return table


def paired(differences: Sequence[float], resolution: float = 0.0) -> dict[str, float]:
    """Return seeds, mean difference, its 95% interval and the two-sided p of Student's t test.

    Args:
        differences: one a seed, at least two.
        resolution: what one image is worth, in points. Where differences spread by less, interval and p are NaN.
    """
    values = np.asarray(differences, float)
    if len(values) < 2:
        raise UsageError(f"a paired test needs at least 2 seeds, got {len(values)}")
    found = {
        "seeds": len(values),
        "difference": values.mean(),
        "low": np.nan,
        "high": np.nan,
        "p": np.nan,
    }
    if np.ptp(values) > max(resolution / 2, 1e-9):
        test = stats.ttest_1samp(values, 0.0)
        interval = test.confidence_interval(0.95)
        found |= {"low": interval.low, "high": interval.high, "p": test.pvalue}
    return found


def holm(p_values: Sequence[float], hypotheses: int = 0) -> np.ndarray:
    """Return p values corrected for their number, or for that of `hypotheses`; NaN counts as a test without result."""
    p_values = np.asarray(p_values, float)
    order, count = np.argsort(p_values), max(len(p_values), hypotheses)  # NaN comes last
    corrected = np.empty_like(p_values)
    corrected[order] = np.maximum.accumulate(
        p_values[order] * (count - np.arange(len(order)))
    ).clip(max=1)
    return corrected


def smallest_shown(spread: float, seeds: int, level: float = 0.05) -> float:
    """Return the true difference, in points, that a paired t test finds with 80% power.

    spread: standard deviation of the seeds' differences.
    """
    return spread * float(np.squeeze(TTestPower().solve_power(nobs=seeds, alpha=level, power=0.8)))


def mean_correlation(top1: pd.DataFrame) -> float:
    """Return the mean over pairs of variants of the correlation of their seeds; NaN where a variant has no spread."""
    return top1.corr().to_numpy()[np.triu_indices(top1.shape[1], 1)].mean()


def compare(top1: pd.DataFrame, question: Sequence[str], resolution: float = 0.0) -> pd.DataFrame:
    """Return the question, then all other pairs of variants, with their p corrected.

    Raises:
        UsageError: not two variants that were run.
    """
    if len(set(question)) != 2 or not set(question) <= set(top1):
        raise UsageError(
            f"--question takes two variants as A,B of {', '.join(top1)}, got {','.join(question)}"
        )
    pairs = [
        tuple(question),
        *(pair for pair in combinations(top1, 2) if set(pair) != set(question)),
    ]
    table = pd.DataFrame(
        [{"first": a, "second": b, **paired(top1[a] - top1[b], resolution)} for a, b in pairs]
    )
    table["p_holm"] = np.append(np.nan, holm(table["p"][1:]))
    return table


def factorial(
    top1: pd.DataFrame, factors: Mapping[str, Mapping[str, int]], resolution: float = 0.0
) -> pd.DataFrame:
    """Return the effects of K factors in 2^K variants: main effects with their p corrected, then interactions of two.

    A main effect is the mean over the others' settings, an interaction the effect of one factor with the other minus
    that without it, which is not tested. factors: by name and variant, -1 without the factor and 1 with it.
    """
    signs = pd.DataFrame(factors)
    cells = top1[list(signs.index)]
    rows = [
        {"name": name, **paired(cells @ signs[name] * 2 / len(signs), resolution)}
        for name in factors
    ]
    rows += [
        {
            "name": f"{a} x {b}",
            **paired(cells @ (signs[a] * signs[b]) * 4 / len(signs), resolution),
            "p": np.nan,
        }
        for a, b in combinations(factors, 2)
    ]
    table = pd.DataFrame(rows)
    return table.assign(p_holm=pd.Series(holm(table["p"][: len(factors)])))


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)]


def labels(table: pd.DataFrame) -> list[str]:
    """Return the names of effects or pairs."""
    return list(table["name"] if "name" in table else table["first"] + " - " + table["second"])


def shown_p(p: float) -> str:
    """Return p as tables have it."""
    return "" if np.isnan(p) else "< 0.001" if p < 5e-4 else f"{p:.3f}"


def effects_table(table: pd.DataFrame) -> list[str]:
    """Return the lines of a table of pairs or effects."""
    return markdown(
        ["", "points", "95% interval", "p", "p, corrected"],
        [
            [
                label,
                f"{row.difference:+.2f}",
                "no spread" if np.isnan(row.low) else f"{row.low:+.2f} to {row.high:+.2f}",
                shown_p(row.p),
                shown_p(row.p_holm),
            ]
            for label, row in zip(labels(table), table.itertuples(), strict=True)
        ],
    )


def study(runs: pd.DataFrame, table: pd.DataFrame) -> str:
    """Return the runs by variant, the table of pairs, and what the runs could have found."""
    top1, options = by_variant(runs), runs.groupby("variant")["options"].first()
    lines = markdown(
        [
            "variant",
            f"top-1 % on {runs['split'].iloc[0]} images, by seed",
            "mean",
            "standard deviation",
            "options",
        ],
        [
            [
                name,
                ", ".join(f"{value:.2f}" for value in top1[name]),
                f"{top1[name].mean():.2f}",
                f"{top1[name].std():.2f}",
                options[name],
            ]
            for name in top1
        ],
    )
    spread = (top1[table["first"][0]] - top1[table["second"][0]]).std()
    return (
        "\n".join(
            [
                *lines,
                "",
                *effects_table(table),
                "",
                f"With the question's spread {len(top1)} seeds find a "
                f"difference of {smallest_shown(spread, len(top1)):.2f} points at 80% power (paired t test, "
                "0.05).",
                f"Mean correlation of the variants over seeds: {mean_correlation(top1):.1f}; near 0, "
                "pairing gains nothing.",
            ]
        )
        + "\n"
    )


def draw_differences(
    axes: Axes, table: pd.DataFrame, names: Sequence[str], blue: Sequence[bool]
) -> None:
    """Draw differences with 95% intervals, the first row on top, in blue what is tested."""
    for place, (row, tested) in enumerate(zip(table.itertuples(), blue, strict=True)):
        colour = "tab:blue" if tested else "0.45"
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2 if tested else 1)
        axes.plot(row.difference, place, "o", color=colour, markersize=4)
    axes.axvline(0, color="0.2", linewidth=0.8)
    axes.set_yticks(range(len(table)), [name.replace("$", r"\$") for name in names])
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)


def plot_evidence(top1: pd.DataFrame, table: pd.DataFrame, split: str) -> Figure:
    """Draw every run, a line a seed, with the means (left), and differences with 95% intervals (right)."""
    figure = Figure(figsize=(9, max(3.6, 0.25 * len(table) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [name.replace("$", r"\$") for name in top1]
    left.plot(names, top1.T, color="0.7", marker="o", markersize=3, linewidth=0.8)
    left.plot(names, top1.mean(), "_", markersize=20, markeredgewidth=2, color="tab:blue")
    left.tick_params(axis="x", rotation=90 if len(names) > 3 else 0)
    left.set_ylabel(f"top-1 on {split} images (%), {len(top1)} seeds and their mean")
    draw_differences(
        right,
        table,
        labels(table),
        table.index == 0 if "first" in table else table["p_holm"].notna(),
    )
    right.set_xlabel("difference, points of top-1, 95% interval")
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", help="sweeps' folders, or files evidence-runs.csv"
    )
    parser.add_argument(
        "--question", metavar="A,B", required=True, help="is variant A better than variant B?"
    )
    parser.add_argument("--variants", metavar="A,B,...", help="compare these alone (default: all)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="default: that of the first source"
    )
    args = parser.parse_args(argv)
    runs = read_runs(*args.runs, variants=args.variants and args.variants.split(","))
    top1, split = by_variant(runs), runs["split"].iloc[0]
    resolution = 100 / runs["images"].dropna().iloc[0] if runs["images"].notna().any() else 0.0
    table = compare(top1, args.question.split(","), resolution)
    folder = args.output or (args.runs[0].parent if args.runs[0].is_file() else args.runs[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_runs(runs, folder / "evidence-runs.csv")
    table.to_csv(folder / "evidence.csv", index=False)
    text = study(runs, table)
    (folder / "evidence.md").write_text(text)
    plot_evidence(top1, table, split).savefig(folder / "evidence.png", dpi=200)
    print(text, f"written: {folder}", sep="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

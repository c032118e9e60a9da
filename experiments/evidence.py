"""Test whether the variants of a sweep differ: paired differences over seeds, with intervals and a picture.

    python -m experiments.evidence sweeps/ea --question EA,none
    python -m experiments.evidence experiments/results/evidence/cifar10-runs.csv --question EA,none -o evidence

Top-1 is measured with the last epoch's weights, on the test images if the runs were tested. Differences are taken seed
by seed; intervals (95%) and p values (two-sided) come from Student's paired t test. `--question A,B` is the question
asked before the runs: is A better than B? Its p is not corrected; the p of all other pairs are corrected together
(Holm).

Sources are folders of sweeps or files of runs; several are read as one. The command writes evidence-runs.csv (one row
per run; a later call can read it in place of the folder), evidence.csv, evidence.md and evidence.png.
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
# Options that do not change the experiment: where and how fast it runs, and what else it writes.
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
    """Return a finished run as a row: the columns, the split it was evaluated on, and its options by name.

    Raises:
        UsageError: the run is not complete.
    """
    if not (folder / "results.json").is_file():
        raise UsageError(f"{folder} is not complete: the sweep's own command continues it")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
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
    """Return the runs of a sweep's folder, each with its model and the options in which the variants differ.

    Raises:
        UsageError: no runs, an incomplete run, or runs of one variant with different options.
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
    options_of = _options_by_variant(rows)
    named = {"model"}
    first = rows[0]["options"]
    for options in options_of.values():
        named.update(key for key, value in options.items() if value != first.get(key))
    for row in rows:
        row["options"] = _shown_options(row["options"], named)
    return pd.DataFrame(rows)


def _options_by_variant(rows: Sequence[Mapping]) -> dict[str, dict]:
    """Return the options of each variant.

    Raises:
        UsageError: runs of one variant with different options.
    """
    by_variant: dict[str, dict] = {}
    for row in rows:
        options = by_variant.setdefault(row["variant"], row["options"])
        for key, value in options.items():
            other = row["options"].get(key)
            if other != value:
                raise UsageError(
                    f"the runs of a variant must have equal options: {key} of {row['variant']} is "
                    f"{value!r} and {other!r}"
                )
    return by_variant


def _shown_options(options: Mapping[str, Any], named: set[str]) -> str:
    """Return the named options as tables show them."""
    words = []
    for key, value in options.items():
        if key in named:
            text = json.dumps(value, default=str).replace('"', "")
            words.append(f"{key}={text}")
    return " ".join(words)


def _of_file(path: Path) -> pd.DataFrame:
    """Return the runs of a file that `write_runs` wrote; raise UsageError for another table."""
    rows = pd.read_csv(path, keep_default_na=False, na_values={"images": "", "updates": ""})
    accuracies = [name for name in rows if name.endswith("_top1")]
    if len(accuracies) != 1 or not {"variant", "seed"} <= set(rows):
        raise UsageError(
            f"{path} must have the columns variant, seed and one of top-1, such as test_top1; it has "
            f"{', '.join(rows)}"
        )
    [top1] = accuracies
    return rows.rename(columns={top1: "top1"}).assign(split=top1.removesuffix("_top1"))


def read_runs(*sources: Path, variants: Sequence[str] | None = None) -> pd.DataFrame:
    """Return the runs of sweeps: COLUMNS and split, in the order of `variants` (None: all, as they are read).

    Raises:
        UsageError: a source without runs, a missing variant, a repeated run, or runs that cannot be compared because
            their data or evaluation images differ, or the numbers of updates within a variant.
    """
    parts = []
    for source in sources:
        parts.append(_of_file(source) if source.is_file() else _of_folder(source, variants))
    runs = pd.concat(parts)
    runs = runs.reindex(columns=[*COLUMNS, "split"]).reset_index(drop=True)
    runs[["images", "updates"]] = runs[["images", "updates"]].astype("Int64")
    runs[["data", "options"]] = runs[["data", "options"]].astype(object).fillna("")
    if variants is not None:
        runs = _in_order(runs, list(variants))
    _check_comparable(runs)
    return runs


def _in_order(runs: pd.DataFrame, variants: list[str]) -> pd.DataFrame:
    """Return the runs in the order of the variants.

    Raises:
        UsageError: a variant has no runs.
    """
    present = runs["variant"].unique()
    missing = [name for name in variants if name not in present]
    if missing:
        raise UsageError(f"no runs of {', '.join(missing)}; there are {', '.join(present)}")
    selected = runs[runs["variant"].isin(variants)]
    return selected.sort_values(
        "variant", key=lambda names: names.map(variants.index), kind="stable"
    )


def _check_comparable(runs: pd.DataFrame) -> None:
    """Raise UsageError unless the runs can be compared; see `read_runs`."""
    for twice in runs[runs.duplicated(["variant", "seed"])].itertuples():
        raise UsageError(
            f"one run of each variant and seed is required, got two of {twice.variant}, seed {twice.seed}"
        )
    common = {
        "split": runs["split"],
        "data": runs["data"].str[:12].replace("", None),
        "number of images": runs["images"],
    }
    for what, values in common.items():
        if values.nunique() > 1:
            got = ", ".join(str(value) for value in values.dropna().unique())
            raise UsageError(f"all runs must have the same {what}, got {got}")
    for name, updates in runs.groupby("variant")["updates"]:
        if updates.nunique() > 1:
            raise UsageError(
                f"the runs of a variant must be equally long, got {name} with "
                f"{' and '.join(map(str, updates.unique()))} updates"
            )


def write_runs(runs: pd.DataFrame, path: Path) -> None:
    """Write runs as a file that `read_runs` reads."""
    split = runs["split"].iloc[0]
    runs[COLUMNS].rename(columns={"top1": f"{split}_top1"}).to_csv(path, index=False)


def by_seed_and_variant(runs: pd.DataFrame) -> pd.DataFrame:
    """Return top-1 in percent, one row per seed and one column per variant, NaN where a run is missing."""
    table = runs.pivot(index="seed", columns="variant", values="top1")
    return table[list(runs["variant"].unique())]


def by_variant(runs: pd.DataFrame) -> pd.DataFrame:
    """Return top-1 as `by_seed_and_variant`.

    Raises:
        UsageError: one variant lacks a seed that another one has.
    """
    table = by_seed_and_variant(runs)
    missing = []
    for name, top1 in table.items():
        seeds = ", ".join(str(seed) for seed in table.index[top1.isna()])
        if seeds:
            missing.append(f"{name}: {seeds}")
    if missing:
        raise UsageError(
            f"the variants must have the same seeds; seeds that are missing: {'; '.join(missing)}"
        )
    return table


def paired(differences: Sequence[float], resolution: float = 0.0) -> dict[str, float]:
    """Return seeds, mean difference, its 95% interval and the two-sided p of Student's t test.

    Args:
        differences: one per seed, at least two.
        resolution: the top-1 points of one image. If the differences spread by less, interval and p are NaN.
    """
    values = np.asarray(differences, float)
    if len(values) < 2:
        raise UsageError(f"a paired test needs at least 2 seeds, got {len(values)}")
    effect = {
        "seeds": len(values),
        "difference": values.mean(),
        "low": np.nan,
        "high": np.nan,
        "p": np.nan,
    }
    if np.ptp(values) > max(resolution / 2, 1e-9):
        test = stats.ttest_1samp(values, 0.0)
        interval = test.confidence_interval(0.95)
        effect |= {"low": interval.low, "high": interval.high, "p": test.pvalue}
    return effect


def holm(p_values: Sequence[float], hypotheses: int = 0) -> np.ndarray:
    """Return p values corrected for their number, or for `hypotheses` if that is larger; NaN counts as a test."""
    p_values = np.asarray(p_values, float)
    count = max(len(p_values), hypotheses)
    order = np.argsort(p_values)  # NaN comes last
    tests_left = count - np.arange(len(order))
    rising = np.maximum.accumulate(p_values[order] * tests_left)
    corrected = np.empty_like(p_values)
    corrected[order] = rising.clip(max=1)
    return corrected


def smallest_shown(spread: float, seeds: int, level: float = 0.05) -> float:
    """Return the true difference, in points, that a paired t test finds with 80% power.

    spread: standard deviation of the seeds' differences.
    """
    effect = TTestPower().solve_power(nobs=seeds, alpha=level, power=0.8)
    return spread * float(np.squeeze(effect))


def mean_correlation(top1: pd.DataFrame) -> float:
    """Return the correlation over seeds of two variants, averaged over all pairs; NaN if a variant has no spread."""
    correlations = top1.corr().to_numpy()
    pairs = np.triu_indices(top1.shape[1], 1)
    return correlations[pairs].mean()


def compare(top1: pd.DataFrame, question: Sequence[str], resolution: float = 0.0) -> pd.DataFrame:
    """Return one row for the question, then one for each other pair of variants, with the p of these corrected.

    Raises:
        UsageError: the question does not name two variants that were run.
    """
    if len(set(question)) != 2 or not set(question) <= set(top1):
        raise UsageError(
            f"--question takes two variants as A,B of {', '.join(top1)}, got {','.join(question)}"
        )
    others = [pair for pair in combinations(top1, 2) if set(pair) != set(question)]
    rows = []
    for first, second in [tuple(question), *others]:
        gain = paired(top1[first] - top1[second], resolution)
        rows.append({"first": first, "second": second, **gain})
    table = pd.DataFrame(rows)
    table["p_holm"] = np.append(np.nan, holm(table["p"][1:]))
    return table


def factorial(
    top1: pd.DataFrame, factors: Mapping[str, Mapping[str, int]], resolution: float = 0.0
) -> pd.DataFrame:
    """Return the effects of K factors in 2^K variants: main effects with their p corrected, then interactions of two.

    A main effect is the mean over the settings of the other factors. An interaction is one factor's effect with the
    other factor minus its effect without it; interactions are not tested.
    factors: factor name -> variant -> 1 with the factor or -1 without it.
    """
    signs = pd.DataFrame(factors)
    cells = top1[list(signs.index)]
    rows = []
    for name in factors:
        effects = cells @ signs[name] * 2 / len(signs)
        rows.append({"name": name, **paired(effects, resolution)})
    for a, b in combinations(factors, 2):
        interactions = cells @ (signs[a] * signs[b]) * 4 / len(signs)
        rows.append({"name": f"{a} x {b}", **paired(interactions, resolution), "p": np.nan})
    table = pd.DataFrame(rows)
    corrected = holm(table["p"][: len(factors)])
    return table.assign(p_holm=pd.Series(corrected))


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def labels(table: pd.DataFrame) -> list[str]:
    """Return the names of effects or pairs."""
    return list(table["name"] if "name" in table else table["first"] + " - " + table["second"])


def shown_p(p: float) -> str:
    """Return p as tables show it."""
    if np.isnan(p):
        return ""
    return "< 0.001" if p < 5e-4 else f"{p:.3f}"


def effects_table(table: pd.DataFrame) -> list[str]:
    """Return the lines of a table of pairs or effects."""
    rows = []
    for label, row in zip(labels(table), table.itertuples(), strict=True):
        interval = f"{row.low:+.2f} to {row.high:+.2f}"
        if np.isnan(row.low):
            interval = "no spread"
        p_values = [shown_p(row.p), shown_p(row.p_holm)]
        rows.append([label, f"{row.difference:+.2f}", interval, *p_values])
    return markdown(["", "points", "95% interval", "p", "p, corrected"], rows)


def variants_table(runs: pd.DataFrame) -> list[str]:
    """Return the lines of a table of the runs by variant."""
    options = runs.groupby("variant")["options"].first()
    rows = []
    for name, top1 in by_variant(runs).items():
        values = ", ".join(f"{value:.2f}" for value in top1)
        rows.append([name, values, f"{top1.mean():.2f}", f"{top1.std():.2f}", options[name]])
    split = runs["split"].iloc[0]
    figures = f"top-1 % on {split} images, by seed"
    return markdown(["variant", figures, "mean", "standard deviation", "options"], rows)


def study(runs: pd.DataFrame, table: pd.DataFrame) -> str:
    """Return Markdown: the runs by variant, the pairs, and the smallest difference that the seeds can find."""
    top1 = by_variant(runs)
    seeds = len(top1)
    spread = (top1[table["first"][0]] - top1[table["second"][0]]).std()
    lines = [
        *variants_table(runs),
        "",
        *effects_table(table),
        "",
        f"With the question's spread {seeds} seeds find a "
        f"difference of {smallest_shown(spread, seeds):.2f} points at 80% power (paired t test, "
        "0.05).",
        f"Mean correlation of the variants over seeds: {mean_correlation(top1):.1f}; near 0, "
        "pairing gains nothing.",
    ]
    return "\n".join(lines) + "\n"


def draw_differences(
    axes: Axes, table: pd.DataFrame, names: Sequence[str], blue: Sequence[bool]
) -> None:
    """Draw differences with 95% intervals, the first row on top, tested ones in blue."""
    for place, (row, tested) in enumerate(zip(table.itertuples(), blue, strict=True)):
        colour = "tab:blue" if tested else "0.45"
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2 if tested else 1)
        axes.plot(row.difference, place, "o", color=colour, markersize=4)
    axes.axvline(0, color="0.2", linewidth=0.8)
    axes.set_yticks(range(len(table)), [name.replace("$", r"\$") for name in names])
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)


def plot_evidence(top1: pd.DataFrame, table: pd.DataFrame, split: str) -> Figure:
    """Draw every run, one line per seed, with the means (left), and differences with 95% intervals (right)."""
    figure = Figure(figsize=(9, max(3.6, 0.25 * len(table) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [name.replace("$", r"\$") for name in top1]
    left.plot(names, top1.T, color="0.7", marker="o", markersize=3, linewidth=0.8)
    left.plot(names, top1.mean(), "_", markersize=20, markeredgewidth=2, color="tab:blue")
    left.tick_params(axis="x", rotation=90 if len(names) > 3 else 0)
    left.set_ylabel(f"top-1 on {split} images (%), {len(top1)} seeds and their mean")
    tested = table.index == 0 if "first" in table else table["p_holm"].notna()
    draw_differences(right, table, labels(table), tested)
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
    variants = args.variants.split(",") if args.variants else None
    runs = read_runs(*args.runs, variants=variants)
    top1 = by_variant(runs)
    split = runs["split"].iloc[0]
    images = runs["images"].dropna()
    resolution = 0.0 if images.empty else 100 / images.iloc[0]
    table = compare(top1, args.question.split(","), resolution)
    first = args.runs[0]
    folder = args.output or (first.parent if first.is_file() else first)
    folder.mkdir(parents=True, exist_ok=True)
    write_runs(runs, folder / "evidence-runs.csv")
    table.to_csv(folder / "evidence.csv", index=False)
    text = study(runs, table)
    (folder / "evidence.md").write_text(text, encoding="utf-8")
    plot_evidence(top1, table, split).savefig(folder / "evidence.png", dpi=200)
    print(text, f"written: {folder}", sep="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

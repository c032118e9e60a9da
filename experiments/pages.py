"""Write the tables on the pages of experiments from the rows of the runs.

    python -m experiments.pages            # `make pages`
    python -m experiments.pages --check    # in `make lint`: a page whose tables differ from the rows is an error

A page has a table between two comments; the text around it is written by hand:

    <!-- table: NAME -->
    <!-- end -->
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from ea_vision.base.errors import UsageError, exit_code
from experiments import break_even, sensitivity
from experiments.collapse import analyse as collapse
from experiments.evidence import by_variant, holm, markdown, paired, read_runs, shown_p
from experiments.sensitivity import HERE, top1_of

RESULTS = HERE / "results"
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
MINUS = "\N{MINUS SIGN}"


def signed(number: float, plus: str = "+") -> str:
    """Return a number with two digits and its sign."""
    return f"{number:{plus}.2f}".replace("-", MINUS)


def points(effect: dict) -> str:
    """Return a difference and its interval: "+0.35 (−0.01 to 0.71)"."""
    interval = f"{signed(effect['low'], '')} to {signed(effect['high'], '')}"
    return f"{signed(effect['difference'])} ({interval})"


def by_seed(top1: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return a table of top-1 by network and seed, and the means."""
    rows = []
    for name in names:
        values = [*top1[name], top1[name].mean()]
        rows.append([name, *("" if np.isnan(value) else f"{value:.2f}" for value in values)])
    heads = ["top-1, %, by seed", *map(str, top1.index), "mean"]
    return markdown(heads, rows)


def differences(
    top1: pd.DataFrame,
    tested: Sequence[tuple[str, str]],
    described: Sequence[tuple[str, str]] = (),
    resolution: float = 0.0,
) -> list[str]:
    """Return a table of paired differences, the p of the tested ones corrected together (Holm)."""
    effects = [paired(top1[a] - top1[b], resolution) for a, b in (*tested, *described)]
    corrected = [
        *holm([effect["p"] for effect in effects[: len(tested)]]),
        *len(described) * [np.nan],
    ]
    rows = []
    for (a, b), effect, p in zip((*tested, *described), effects, corrected, strict=True):
        rows.append([f"{a} {MINUS} {b}", points(effect), shown_p(p)])
    return markdown(["difference", "points (95% interval)", "p, corrected"], rows)


def looks(top1: pd.DataFrame, better: str, worse: str, seeds: Iterable[int]) -> list[str]:
    """Return a table of a difference as it stood when we looked, after each of these numbers of seeds."""
    gains = top1[better] - top1[worse]
    rows = [[str(number), points(paired(gains[:number], 0.01))] for number in seeds]
    return markdown(["seeds", f"{better} {MINUS} {worse}"], rows)


def plain_table(table: pd.DataFrame, heads: Sequence[str]) -> list[str]:
    """Return a table of the columns of a data frame; a missing number is an empty cell."""
    rows = []
    for values in table.itertuples(index=False):
        rows.append(
            [
                "" if pd.isna(value) else f"{value:.2f}" if isinstance(value, float) else str(value)
                for value in values
            ]
        )
    return markdown(heads, rows)


def formatted(table: pd.DataFrame, columns: dict[str, str]) -> list[str]:
    """Return a table of a data frame's rows; columns: head -> text with the row's columns in braces.

    A cell with a missing number is empty.
    """
    rows = []
    for row in table.to_dict("records"):
        cells = [text.format(**row) for text in columns.values()]
        rows.append(["" if re.search(r"\bnan\b", cell) else cell for cell in cells])
    return markdown(list(columns), rows)


def of_file(name: str, columns: dict[str, str]) -> list[str]:
    """Return `formatted` of a file of experiments/results."""
    return formatted(pd.read_csv(RESULTS / name), columns)


def side_by_side(table: pd.DataFrame, index: Sequence[str], column: str) -> pd.DataFrame:
    """Return one row per index in the file's order; "ms eager" is the value of ms where `column` is eager."""
    wide = table.pivot(index=[*index], columns=column)
    wide.columns = [f"{name} {value}" for name, value in wide.columns]
    order = pd.MultiIndex.from_frame(table[[*index]].drop_duplicates())
    return wide.loc[order if len(index) > 1 else order.get_level_values(0)].reset_index()


# ---- the pages -------------------------------------------------------------------------------------------------------

NETWORKS = ("cnn", "none", "none + norm", "EA + norm")


def collapse_top1(data: str) -> pd.DataFrame:
    return top1_of(RESULTS / "collapse.csv", data)


def collapse_differences(data: str) -> list[str]:
    return differences(collapse_top1(data), collapse.HYPOTHESES, collapse.DESCRIBED, 0.01)


def controlled_top1() -> pd.DataFrame:
    """Return the top-1 of run B and of its controls, on CIFAR-100."""
    return collapse_top1("cifar100").join(top1_of(RESULTS / "collapse-controls.csv"))


def halves() -> list[str]:
    """Return the differences of the controls over the seeds of both machines."""
    effects = pd.read_csv(RESULTS / "collapse-controls-effects.csv").set_index("name")
    rows = []
    for name, means in effects[[*collapse.HALVES]].iterrows():
        rows.append([name.replace("-", MINUS), *map(signed, means)])
    return markdown(["difference, points", *collapse.HALVES], rows)


def controls() -> list[str]:
    """Return what longer training and maps that look at nothing bring on CIFAR-100, beside the norm."""
    ten = collapse_top1("cifar100")
    five = top1_of(HERE / "factorial" / "cifar100-runs.csv")
    uniform = pd.read_csv(RESULTS / "across" / "cifar100.csv")
    uniform = uniform.pivot(index="seed", columns="variant", values="test_top1")
    longer = five["none equal time"]
    effects = {
        "the norm, ten seeds": ten["none + norm"] - ten["none"],
        "6.4% more updates (1,660 for 1,560), seeds 5 to 9": longer - five["none"],
        "the norm over 6.4% more updates, seeds 5 to 9": ten["none + norm"].loc[5:9] - longer,
        "uniform maps, six other seeds, 45,000 images": uniform["uniform"] - uniform["none"],
    }
    rows = [[name, points(paired(gains.dropna(), 0.01))] for name, gains in effects.items()]
    return markdown([f"CIFAR-100, {MINUS} none", "points (95% interval)"], rows)


def break_evens(better: Sequence[str]) -> list[str]:
    """Return how much longer a training may take and takes; the last column is an estimate."""
    table = break_even.table()
    table = table[table["comparison"].isin(better)]
    rows = []
    for row in table.itertuples():
        interval = "" if np.isnan(row.low) else f" ({row.low:.2f} to {row.high:.2f})"
        rows.append(
            [
                row.comparison.replace("-", MINUS),
                signed(row.gain),
                f"{row.break_even:.2f}{interval}",
                f"{row.time_ratio:.2f}",
                signed(row.at_equal_time),
            ]
        )
    heads = [
        "difference",
        "at equal updates",
        "break-even, times",
        "takes, times",
        "at equal time, estimated",
    ]
    return markdown(heads, rows)


def power(starts: tuple[str, ...]) -> list[str]:
    """Return what the studies whose names begin so could have found."""
    table = sensitivity.table()
    table = table[table["study"].str.startswith(starts)]
    columns = ["study", "comparison", "seeds", "spread", "found_at_80_percent"]
    return plain_table(table[columns], ["study", "difference", "seeds", "spread", "finds at 80%"])


SETS = ("cifar10", "cifar100")
PAIRS = (
    ("EA", "none"),
    ("none 5 epochs", "none"),
    ("none 5 epochs", "EA"),
    ("EA without convolution", "none"),
    ("EA without convolution", "EA without skip"),
    ("PA", "none"),
    ("cnn", "EA"),
    ("cnn", "none"),
)
HELD_OUT_PAIRS = (
    ("EA", "none"),
    ("EA more blocks", "none more blocks"),
    ("EA slower attention", "none slower attention"),
    ("EA learned", "EA"),
    ("EA learned", "none"),
    ("EA alpha 0.2", "none"),
    ("EA alpha 0.2", "EA"),
)


def evidence(data: str) -> pd.DataFrame:
    """Return top-1 by seed and variant of seeds 0 to 4."""
    return top1_of(RESULTS / "evidence" / f"{data}-runs.csv")


def best_first(top1: pd.DataFrame) -> list[str]:
    """Return a table of top-1 by variant and seed, the highest mean first."""
    return by_seed(top1, top1.mean().sort_values(ascending=False).index)


def evidence_pairs() -> list[str]:
    """Return the differences of seeds 0 to 4; p is corrected for all pairs but the question's."""
    rows = []
    for first, second in PAIRS:
        row = [f"{first} {MINUS} {second}"]
        for data in SETS:
            top1 = evidence(data)
            kept = pd.read_csv(RESULTS / "evidence" / f"{data}-pairs.csv")
            same = kept[[set(pair) == {first, second} for pair in kept[["first", "second"]].values]]
            p = same["p"] if (first, second) == ("EA", "none") else same["p_holm"]
            row += [points(paired(top1[first] - top1[second], 0.01)), shown_p(p.item())]
        rows.append(row)
    return markdown(["points (95% interval)", "CIFAR-10", "p", "CIFAR-100", "p"], rows)


def held_out(fine: bool = False) -> pd.DataFrame:
    """Return accuracy on held-out images by seed and variant; fine: the networks with maps of 16x16."""
    runs = read_runs(RESULTS / "evidence" / "cifar10-held-out-runs.csv")
    return by_variant(runs[runs["variant"].str.contains("16x16") == fine])


def learned_gates() -> list[str]:
    """Return the ranges of the learned gates after training."""
    gates = pd.read_csv(RESULTS / "evidence" / "learned-gates.csv")
    rows = [
        [name, f"{gates[name].min():.2f}", f"{gates[name].max():.2f}"] for name in ("alpha", "beta")
    ]
    return markdown(["gate", "lowest", "highest"], rows)


AA, PA, EA = (f"{kind}conv_transformer_cifar" for kind in ("", "pa_", "ea_"))
HEALTHY = HERE / "healthy_maps"
SHIPPED = {"none_long": f"{AA}.long_c10", "ea_long": f"{EA}.long_c10", PA: f"{PA}.fast_norm_c10"}
SHIPPED_BY_KIND = {"AA": SHIPPED["none_long"], "PA": SHIPPED[PA], "EA": SHIPPED["ea_long"]}
LONG_RUNS = (  # label, file of its epochs
    ("AA, 10 epochs without the norm", f"results/fast-cifar10/{AA}.csv"),
    ("PA, 10 epochs without the norm", f"results/fast-cifar10/{PA}.csv"),
    ("EA, 10 epochs without the norm", f"results/fast-cifar10/{EA}.csv"),
    ("AA, 10 epochs with the norm", f"healthy_maps/{AA}.csv"),
    ("EA, 10 epochs with the norm", f"healthy_maps/{EA}.csv"),
    ("EA, the same and a cycle of 6", "healthy_maps/ea_second_cycle.csv"),
    ("PA, 10 without and 5 with the norm: shipped", f"healthy_maps/{PA}.csv"),
    ("AA, 60 epochs of cifar_long: shipped", "healthy_maps/none_long.csv"),
    ("EA, 60 epochs of cifar_long: shipped", "healthy_maps/ea_long.csv"),
    ("EA, CIFAR-100, 57 epochs of cifar_long", "healthy_maps/ea_long_cifar100.csv"),
)


def long_runs() -> list[str]:
    """Return the last epoch of each full-size run; accuracies as stored and of six views are the cards' if it ships."""
    former = pd.read_csv(HEALTHY / "former-accuracy.csv", dtype=str).set_index("run")
    rows = []
    for label, file in LONG_RUNS:
        path = HERE / file
        last = pd.read_csv(path).iloc[-1]
        accuracies = ["", ""]
        if path.parent == HEALTHY and path.stem in former.index:
            accuracies = list(former.loc[path.stem, ["stored", "six_views"]])
        elif path.parent == HEALTHY and path.stem in SHIPPED:
            card = (HERE.parent / "weights" / f"{SHIPPED[path.stem]}.md").read_text(
                encoding="utf-8"
            )
            accuracies = re.findall(r"(\d\d\.\d\d)%(?: top-1,|\. 10000)", card)[:2]
        rows.append([label, f"{last['top1']:.2f}", *accuracies, f"{last['train_loss']:.4f}"])
    return markdown(["run", "bfloat16, %", "stored, %", "six views, %", "training loss"], rows)


def entropies() -> list[str]:
    """Return the entropy of the maps by layer of the former weights, those with the norm and the shipped ones."""
    files = (
        HEALTHY / "collapsed-entropy.csv",
        HEALTHY / "former-entropy.csv",
        RESULTS / "shipped-entropy.csv",
    )
    figures = pd.concat([pd.read_csv(file) for file in files]).drop_duplicates(["model", "layer"])
    shares = figures[figures["model"].str.contains("conv_transformer_cifar")]
    shares = shares.pivot(index="model", columns="layer", values="entropy_share")
    rows = [[f"`{name}`", *(f"{share:.2f}" for share in row)] for name, row in shares.iterrows()]
    return markdown(["weights", *(f"layer {layer}" for layer in shares)], rows)


KINDS = ("trained", "uniform", "mean", "other", "none", "own")


def replaced(rows: Iterable[tuple[Sequence[str], pd.Series]], heads: Sequence[str]) -> list[str]:
    """Return a table of accuracy with replaced maps: first cells and top-1 by kind of maps of each row."""
    lines = []
    for cells, top1 in rows:
        lines.append([*cells, *(f"{top1[kind]:.2f}" if kind in top1 else "" for kind in KINDS)])
    return markdown([*heads, "as trained", *KINDS[1:]], lines)


def replaced_of(name: str) -> dict[str, pd.Series]:
    """Return top-1 by kind of maps, by network, of a file; the narrow networks' is the mean of their seeds."""
    figures = pd.read_csv(RESULTS / "replaced-maps" / f"{name}-replaced.csv")
    network = figures["model"].str.replace(r".*variant=(.*),seed=\d", r"narrow \1", regex=True)
    means = figures.groupby([network, "maps"], sort=False)["top1"].mean()
    return {label: means[label] for label in means.index.unique("model")}


def replaced_maps(**labels: str) -> list[str]:
    """Return a table of files of replaced maps, by label; "": the labels are those of the networks in the file."""
    rows = []
    for name, label in labels.items():
        for network, top1 in replaced_of(name.replace("_", "-")).items():
            rows.append(([label or network], top1))
    return replaced(rows, ["network"])


def slower_attention() -> list[str]:
    """Return the full networks of 10 epochs with one rate for all and with a quarter of it for attention."""
    rows = []
    for name in (AA, EA):
        for rate, runs, maps in (
            ("1", "fast-cifar10", "full"),
            ("0.25", "attention-lr-cifar10", "attention-lr-10-epochs"),
        ):
            last = pd.read_csv(RESULTS / runs / f"{name}.csv").iloc[-1]
            [top1] = [
                of for label, of in replaced_of(maps).items() if re.match(rf"{name}\b", label)
            ]
            rows.append(([name, rate, f"{last['top1']:.2f}", f"{last['train_loss']:.4f}"], top1))
    return replaced(rows, ["network", "rate of attention", "top-1, %", "training loss"])


def slower_attention_early() -> list[str]:
    """Return EA after 3 epochs with one rate for all and with a quarter of it for attention."""
    rows = []
    for label, top1 in replaced_of("attention-lr").items():
        rows.append((["0.25" if "attention-lr" in label else "1"], top1))
    return replaced(rows, ["rate of attention"])


def spread(values: pd.Series) -> str:
    """Return mean and standard deviation: "25.50 ± 0.59"."""
    return f"{values.mean():.2f} ± {values.std():.2f}"


def probe_of_scenes() -> list[str]:
    """Return what maps of the shipped scene networks tell about the class, by layer and kind of maps."""
    table = pd.read_csv(RESULTS / "probe" / "scenes" / "results.csv")
    spreads = table.groupby(["model", "maps", "layer"], sort=False)["top1"].apply(spread)
    wide = side_by_side(spreads.reset_index(), ["model", "maps"], "layer")
    layers = {f"layer {layer}": f"{{top1 {layer}}}" for layer in (16, 17, 18)}
    return formatted(wide, {"network": "{model}", "maps": "{maps}", **layers})


def faithfulness_of_scenes() -> list[str]:
    """Return two scores of faithfulness by ranking and network."""
    table = pd.read_csv(RESULTS / "faithfulness" / "scenes" / "results.csv")
    wide = side_by_side(table, ["ranking"], "model")
    columns = {"ranking": "{ranking}"}
    for score in ("comprehensiveness", "sufficiency"):
        for model, label in (("aa_resnet34_050", "AA"), ("ea_aa_resnet34_050", "EA")):
            text = f"{{{score} {model}:.3f}} ± {{{score}_se {model}:.3f}}"
            columns[f"{label}, {score}"] = text
    return formatted(wide, columns)


def last_epochs(folder: str, columns: dict[str, str]) -> list[str]:
    """Return a table of the last rows of the metrics in a folder of experiments/results, by the file's name."""
    rows = []
    for path in sorted((RESULTS / folder).glob("*.csv")):
        rows.append(pd.read_csv(path).iloc[[-1]].assign(name=path.stem))
    return formatted(pd.concat(rows), columns)


def means(table: pd.DataFrame, key: str, columns: dict[str, str]) -> list[str]:
    """Return a table by key in the file's order; "top1 0" is the value of seed 0, "top1 mean" the mean of the seeds."""
    wide = side_by_side(table, [key], "seed").set_index(key)
    mean = table.groupby(key).mean(numeric_only=True).add_suffix(" mean") + 1e-9
    return formatted(wide.join(mean).reset_index(), columns)


def detectors() -> list[str]:
    """Return AP of the detectors on pasted objects, two seeds each."""
    rows = []
    for name, label in (("plain", "resnet18"), ("aa", "aa_resnet34"), ("ea_aa", "ea_aa_resnet34")):
        for seed in (0, 1):
            last = pd.read_csv(RESULTS / "detection" / f"{name}-seed{seed}.csv").iloc[[-1]]
            rows.append(last.assign(backbone=label, seed=seed))
    columns = {"backbone": "{backbone}"}
    for measure in ("AP", "AP50"):
        columns[f"{measure}, seeds 0 and 1"] = f"{{{measure} 0:.1f}}, {{{measure} 1:.1f}}"
        columns[f"{measure}, mean"] = f"{{{measure} mean:.1f}}"
    return means(pd.concat(rows), "backbone", {**columns, "AP75, mean": "{AP75 mean:.1f}"})


def small_detectors() -> list[str]:
    """Return AP of the mean box and of the detector on photos of 64 pixels."""
    mean_box = pd.read_csv(RESULTS / "detection" / "tiny-mean-box.csv").assign(name="mean box")
    detector = pd.read_csv(RESULTS / "detection" / "tiny-ea.csv").iloc[[-1]]
    rows = pd.concat([mean_box, detector.assign(name="ea_aa_resnet34, one block per stage")])
    measures = {measure: f"{{{measure}:.1f}}" for measure in ("AP", "AP50", "AP75")}
    return formatted(rows, {"predictions": "{name}", **measures})


def sentences() -> list[str]:
    """Return test accuracy on SST and the differences to the network without evolution."""
    test = pd.read_csv(RESULTS / "sst.csv").pivot(index="seed", columns="network", values="test")
    effects = {name: paired(test[name] - test["none"], 0.01) for name in ("PA", "EA")}
    corrected = holm([effect["p"] for effect in effects.values()])
    rows = [["none", spread(test["none"]), "", ""]]
    for (name, effect), p in zip(effects.items(), corrected, strict=True):
        rows.append([name, spread(test[name]), points(effect), f"{p:.3f}"])
    heads = ["network", "test accuracy, mean and standard deviation", "minus none", "p, corrected"]
    return markdown(heads, rows)


def parts_of_a_layer() -> list[str]:
    """Return milliseconds of the parts of a layer, by size of the map, and their sum."""
    table = pd.read_csv(RESULTS / "large-maps-parts.csv")
    table["cell"] = table["pixels"].astype(str) + " " + table["pass"]
    wide = side_by_side(table[["part", "cell", "ms"]], ["part"], "cell")
    total = wide.sum(numeric_only=True).to_frame().T.assign(part="all")
    columns = {"part": "{part}"}
    for pixels in (196, 400, 784, 2500):
        columns[f"{pixels:,} pixels"] = f"{{ms {pixels} forward:.1f}}, {{ms {pixels} backward:.1f}}"
    return formatted(pd.concat([wide, total]), columns)


def networks_by_image_size() -> list[str]:
    """Return rates relative to ResNet-50 and the peak memory of training, by size of the image."""
    sizes = pd.read_csv(RESULTS / "large-maps-sizes.csv").query(
        "code == 'after' and malloc == 'kept'"
    )
    largest = pd.read_csv(RESULTS / "large-maps.csv")
    plain = largest.set_index("network").loc["resnet50"]
    for step in ("inference", "training"):
        largest[f"{step}, ratio"] = plain[f"{step}, s"] / largest[f"{step}, s"]
    both = pd.concat([sizes, largest[largest["network"].isin(sizes["network"])]])
    wide = side_by_side(both, ["network"], "size")
    columns = {"network": "{network}"}
    for size in (224, 320, 448, 640):
        rates = f"{{inference, ratio {size}:.2f}}, {{training, ratio {size}:.2f}}"
        columns[f"{size} pixels"] = f"{rates}; {{peak, MiB {size}:,.0f}}"
    return formatted(wide, columns)


def kernel_figures() -> list[str]:
    """Return the compiler's figures for a layer of ea_aa_resnet50 at 14x14."""
    table = pd.read_csv(RESULTS / "kernel-figures.csv")
    return formatted(
        table.query("layer == 'ea50' and GPU == 9.0 and dtype == 'bf16'"),
        {
            "kernel": "`{kernel}`",
            "registers": "{registers}",
            "shared KiB": "{shared KiB:.1f}",
            "blocks per multiprocessor": "{blocks}",
            "instructions and barriers of the loop": "{instructions}, {barriers}",
        },
    )


def fused_kernels() -> list[str]:
    """Return what the compiler says of the kernels of maps_on_gpu on three GPUs, and modelled times on an H200."""
    table = pd.read_csv(HERE / "maps_on_gpu" / "cubins.csv")
    columns = {"kernel": "`{kernel}`", "layer": "{layer}"}
    heads = {
        "registers": "registers",
        "spilled_bytes": "spilled bytes",
        "an_element": "instructions",
    }
    for name, head in heads.items():
        columns[head] = ", ".join(f"{{{name} {target}}}" for target in table["target"].unique())
    for name, head in {
        "issue": "issue",
        "shared": "shared, L1",
        "l2": "L2",
        "dram": "DRAM",
    }.items():
        columns[head] = f"{{{name}_ms sm_90:.2f}}"
    return formatted(side_by_side(table, ["kernel", "layer"], "target"), columns)


def resnets_on_a_gpu() -> list[str]:
    """Return milliseconds of the steps of ResNets, in brackets the rate or memory relative to resnet50."""
    table = pd.read_csv(RESULTS / "h200" / "resnets.csv")
    columns = {"network": "{network}", "attention": "{implementation}"}
    for mode, head in (("eager", "eager"), ("default", "compiled"), ("reduce-overhead", "graphs")):
        columns[head] = f"{{train_ms {mode}:.2f}} ({{train_rate_ratio {mode}:.2f}})"
    columns["inference, eager"] = "{infer_ms eager:.2f} ({infer_rate_ratio eager:.2f})"
    columns["peak GiB, compiled"] = "{peak_gib default:.2f} ({memory_ratio default:.2f})"
    wide = side_by_side(table, ["network", "implementation"], "mode")
    return formatted(wide, columns)


def fastest_resnets() -> list[str]:
    """Return training rates and memory relative to resnet50, each by the attention that is the fastest."""
    table = pd.read_csv(RESULTS / "h200" / "resnets.csv").query("network != 'resnet50'")
    fastest = table.sort_values("train_ms").drop_duplicates(["network", "mode"])
    columns = {"network": "{network}"}
    for mode, head in (("eager", "eager"), ("default", "compiled")):
        columns[head] = f"{{train_rate_ratio {mode}:.2f}}"
    columns["peak memory, compiled"] = "{memory_ratio default:.2f}"
    return formatted(side_by_side(fastest, ["network"], "mode"), columns)


def cifar_steps_on_a_gpu() -> list[str]:
    table = pd.read_csv(RESULTS / "h200" / "cifar-steps.csv")
    columns = {"batch": "{batch}", "optimiser": "{optimizer}"}
    for mode, head in (("eager", "eager"), ("default", "compiled"), ("reduce-overhead", "graphs")):
        columns[head] = f"{{ms {mode}:.2f}}"
    return formatted(side_by_side(table, ["batch", "optimizer"], "mode"), columns)


ONNX_KINDS = {"Conv": "convolutions", "MatMul": "products", "FusedMatMul": "products"}


def onnx_profile() -> list[str]:
    """Return ONNX Runtime's milliseconds by kind of operation."""
    table = pd.read_csv(RESULTS / "onnx-profile.csv").set_index("operation")
    kinds = table.index.map({**ONNX_KINDS, "Softmax": "softmax"}).fillna("all else")
    sums = table.groupby(kinds).sum()
    sums.loc["all"] = sums.sum()
    networks = {name: f"{{{name}:.0f}}" for name in table}
    return formatted(
        sums.reset_index(names="operations"), {"operations": "{operations}", **networks}
    )


def probe() -> list[str]:
    """Return what maps tell about the class, by network and kind of maps, in two layers of two trainings."""
    files = [pd.read_csv(RESULTS / "probe" / f"{name}.csv") for name in ("results", "former")]
    spreads = pd.concat(files).groupby(["model", "maps", "layer"])["top1"].apply(spread)
    rows = []
    for maps in ("trained", "untrained", "shuffled"):
        for label, shipped in SHIPPED_BY_KIND.items():
            former = f"{shipped.partition('.')[0]}.fast_c10"
            columns = [
                spreads[model, maps, layer] for model in (shipped, former) for layer in (3, 6)
            ]
            rows.append([label, maps, *columns])
    return markdown(
        ["network", "maps", "layer 3", "layer 6", "former, layer 3", "former, layer 6"], rows
    )


def faithfulness() -> list[str]:
    """Return the four scores by ranking and network."""
    table = pd.read_csv(RESULTS / "faithfulness" / "results.csv").set_index(["ranking", "model"])
    rows = []
    for score in ("comprehensiveness", "sufficiency", "deletion", "insertion"):
        for ranking in table.index.unique("ranking"):
            model_rows = [table.loc[(ranking, model)] for model in SHIPPED_BY_KIND.values()]
            rows.append(
                [
                    score,
                    ranking,
                    *(f"{row[score]:.3f} ± {row[f'{score}_se']:.3f}" for row in model_rows),
                ]
            )
    return markdown(["score", "ranking", *SHIPPED_BY_KIND], rows)


def norm_effects() -> list[str]:
    """Return what the norm changes in the narrow networks."""
    table = pd.read_csv(HEALTHY / "norm-effects.csv")
    rows = [[row["name"], points(row), shown_p(row["p_holm"])] for row in table.to_dict("records")]
    return markdown(["with the norm minus without", "points (95% interval)", "p, corrected"], rows)


def trials() -> list[str]:
    """Return the trials of the long recipe."""
    table = pd.read_csv(HEALTHY / "trials.csv")
    shares = table.filter(like="entropy_").min(axis=1)
    return plain_table(
        pd.DataFrame(
            {
                "trial": table["trial"],
                "options": table["options"],
                "top1": table["held_out_top1"],
                "least": shares,
            }
        ),
        ["trial", "options", "held-out top-1, %", "least entropy over log N of a layer"],
    )


def verdict(start: str) -> list[str]:
    """Return the differences of the parts of the study across layers whose names begin so."""
    table = pd.read_csv(RESULTS / "across" / "verdict.csv")
    rows = []
    for row in table[table["part"].str.startswith(start)].to_dict("records"):
        effect = signed(row["difference"]) if row["seeds"] == 1 else points(row)
        p = shown_p(row["p_holm"])
        finds = "" if np.isnan(row["low"]) else f"{row['found_at_80_percent']:.2f}"
        compared = f"{row['name']} {MINUS} {row['against']}"
        rows.append([f"`{row['part']}`", compared, str(row["seeds"]), effect, p, finds])
    heads = ["part", "difference", "seeds", "points (95% interval)", "p, corrected", "finds at 80%"]
    return markdown(heads, rows)


ADDED = ("plain", "aa", "ea", "plain-18")
ADDED_QUESTIONS = (("aa", "plain"), ("ea", "plain"), ("ea", "aa"))
ADDED_AFTERWARDS = (("aa", "plain-18"), ("ea", "plain-18"))


def added_top1() -> pd.DataFrame:
    return top1_of(RESULTS / "added-attention-runs.csv")


ABLATION = {
    "params M": "{params_m:.3f}",
    "MFLOPs (profiler)": "{mflops_profiler:.1f}",
    "top-1 %, held out": "{held_out_top1:.2f}",
    "training loss": "{train_loss:.3f}",
}
SHORT_RUNS = {
    "model": "{name}",
    "top-1 %": "{top1:.2f}",
    "top-5 %": "{top5:.2f}",
    "training loss": "{train_loss:.4f}",
}
TINY_RUNS = {
    "top-1 %, seeds 0 and 1": "{top1 0:.2f}, {top1 1:.2f}",
    "mean": "{top1 mean:.2f}",
    "training loss": "{train_loss 0:.3f}, {train_loss 1:.3f}",
    "processor seconds": "{processor_seconds 0:.0f}, {processor_seconds 1:.0f}",
    "peak memory, MiB": "{memory_mib 0:,.0f}, {memory_mib 1:,.0f}",
}


def tiny_runs(name: str, where: str = "epochs > 0") -> list[str]:
    """Return a table of runs on Tiny-ImageNet, two seeds each."""
    runs = pd.read_csv(RESULTS / "tiny-imagenet" / f"{name}.csv").query(where)
    return means(runs, "run", {"run": "{run}", **TINY_RUNS})


def spawned_workers() -> list[str]:
    """Medians of an epoch's seconds by the way in which workers start."""
    table = pd.read_csv(RESULTS / "spawned-workers.csv")
    medians = table.groupby(["method", "epoch"])["seconds"].median().unstack()
    rows = [[method, *(f"{x:.1f}" for x in seconds)] for method, seconds in medians.iterrows()]
    return markdown(["start", *(f"epoch {number}, s" for number in medians)], rows)


def added_attention_steps() -> list[str]:
    """Training steps of attention beside the convolutions, by stages and heads, in plain steps."""
    table = pd.read_csv(RESULTS / "added-attention-widths.csv")
    table["ratio"] = table["ratio"].map("{:.2f}".format)
    cells = table.groupby(["network", "place"], sort=False)["ratio"].agg(", ".join).unstack()
    cells = cells[list(dict.fromkeys(table["place"]))]
    rows = [[network, *row] for network, row in zip(cells.index, cells.to_numpy(), strict=True)]
    return markdown(["network", *cells.columns], rows)


def cheap_steps() -> list[str]:
    """Processor time of the networks' training steps on both machines."""
    times = pd.read_csv(RESULTS / "cheap-attention-times.csv")
    machine = times["hardware"].str.extract("(EPYC|Xeon)", expand=False)
    wide = side_by_side(times.assign(machine=machine), ["way"], "machine")
    columns = {"way": "`{way}`"}
    for name in machine.unique():
        columns[f"{name}, ms"] = f"{{train_ms {name}:.0f}}"
        columns[f"r, {name}"] = f"{{ratio {name}:.3f}}"
    return formatted(wide, columns)


def cheap_pilot() -> list[str]:
    """Top-1 on the validation photos, by placement and of the plain network at equal time."""
    return by_way(pd.read_csv(RESULTS / "cheap-attention-pilot.csv"))


def cheap_rates() -> list[str]:
    """Top-1 on the validation photos by learning rate, beginning with the recipe's, of the first pilot."""
    rates = pd.read_csv(RESULTS / "cheap-attention-rates.csv")
    pilot = pd.read_csv(RESULTS / "cheap-attention-pilot.csv")
    bases = rates["way"].str.partition(" rate ")[0]
    return by_way(
        pd.concat([pilot[pilot["way"].isin(bases)], rates]).sort_values("way", key=by_rate)
    )


def by_rate(ways: pd.Series) -> pd.Series:
    """Return keys that sort ways by name, then by rate."""
    parts = ways.str.partition(" rate ")
    return parts[0] + parts[2].str.zfill(3)


def by_way(table: pd.DataFrame) -> list[str]:
    """Top-1 on the validation photos of a pilot's runs."""
    top1 = table.pivot(index="seed", columns="way", values="validation_top1")
    return by_seed(top1, table["way"].unique())


def cheap_top1() -> list[str]:
    """Top-1 of the study."""
    from experiments.cheap_attention.run import by_seed_and_way

    top1 = by_seed_and_way()
    return by_seed(top1, list(top1))


def cheap_answers() -> list[str]:
    """The study's differences."""
    from experiments.cheap_attention.run import answers

    return answers()


TABLES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "docs/fine-tune.md": {"widths": added_attention_steps},
    "docs/imagenet.md": {
        "loaders": lambda: of_file(
            "loaders.csv",
            {
                "loader": "{loader}",
                "MiB": "{mib}",
                "images/s": "{images_per_s:,}",
                "a step of 1,000 images/s waits": "{waits_percent}%",
            },
        )
    },
    "docs/record.md": {
        "cost": lambda: of_file(
            "recording-cost.csv",
            {
                "8 images, all layers, 1 thread": "`{network}`",
                "plain, s": "{plain_s:.2f}",
                "recorded, s": "{recorded_s:.2f}",
                "maps, MiB per image": "{maps_mib:.1f}",
            },
        )
    },
    "docs/kernels.md": {
        "GPU": fastest_resnets,
        "large": lambda: of_file(
            "large-maps.csv",
            {
                "network of 50 layers": "{network}",
                "inference": "{inference, s:.2f}",
                "training": "{training, s:.2f}",
                "MiB": "{peak, MiB:,.0f}",
            },
        ),
    },
    "experiments/kernels.md": {
        "parts": parts_of_a_layer,
        "sizes": networks_by_image_size,
        "compiler": kernel_figures,
        "calls": lambda: of_file(
            "gpu-calls.csv",
            {
                "network": "{network}",
                "before": "{forward_before:,} + {backward_before:,}",
                "now": "{forward:,} + {backward:,}",
            },
        ),
        "resnets": resnets_on_a_gpu,
        "layers": lambda: formatted(
            side_by_side(pd.read_csv(RESULTS / "h200" / "layers.csv"), ["layer"], "side"),
            {"layer": "{layer}", "14x14": "{ms 14:.2f}", "28x28": "{ms 28:.2f}"},
        ),
        "CIFAR steps": cifar_steps_on_a_gpu,
        "ONNX Runtime": onnx_profile,
    },
    "experiments/maps_on_gpu/README.md": {"cubins": fused_kernels},
    "experiments/cifar.md": {
        "fast": lambda: last_epochs("fast-cifar10", SHORT_RUNS),
        "fast_sgd": lambda: last_epochs("fast-sgd-cifar10", SHORT_RUNS),
        "share": lambda: of_file("ablation/share.csv", {"share": "{share:g}", **ABLATION}),
        "position": lambda: of_file(
            "ablation/position.csv", {"position": "{position}", **ABLATION}
        ),
        "Wide-ResNets": lambda: means(
            pd.read_csv(RESULTS / "wrn16-4-short.csv"),
            "model",
            {
                "network": "{model}",
                "top-1 %, seeds 0, 1, 2": "{held_out_top1 0:.2f}, {held_out_top1 1:.2f}, "
                "{held_out_top1 2:.2f}",
                "mean": "{held_out_top1 mean:.2f}",
            },
        ),
    },
    "experiments/scenes/README.md": {
        "half width": lambda: of_file(
            "scenes/results.csv",
            {
                "network": "{model}",
                "validation": "{validation_top1:.2f}",
                "test": "{top1:.2f}",
                "95% interval": "{interval}",
                "minutes": "{minutes}",
            },
        ),
        "quarter width": lambda: by_seed(
            top1_of(RESULTS / "scenes" / "quarter-width-runs.csv"), ("plain", "AA", "EA", "taught")
        ),
        "probe": probe_of_scenes,
        "faithfulness": faithfulness_of_scenes,
    },
    "experiments/finetune_scenes/README.md": {
        "by seed": lambda: by_seed(
            top1_of(RESULTS / "finetune-scenes-runs.csv"), ("plain", "gates", "residual", "conv2d")
        ),
        "differences": lambda: differences(
            top1_of(RESULTS / "finetune-scenes-runs.csv"),
            [(way, "plain") for way in ("gates", "residual", "conv2d")],
        ),
    },
    "experiments/detection.md": {"pasted objects": detectors, "Tiny-ImageNet": small_detectors},
    "experiments/across/README.md": {
        "second": lambda: verdict("second-"),
        "third": lambda: verdict("third-"),
    },
    "experiments/across/fourth.md": {"fourth": lambda: verdict("fourth-")},
    "experiments/text/README.md": {"results": sentences},
    "experiments/others.md": {
        "Tiny-ImageNet": lambda: tiny_runs("attention", "images == 160"),
        "digits": lambda: formatted(
            side_by_side(pd.read_csv(RESULTS / "moved-digits.csv"), ["seed"], "transform"),
            {"seed": "{seed}", "with": "{top1 True:.2f}", "without": "{top1 False:.2f}"},
        ),
        "beside timm": lambda: tiny_runs("beside-timm"),
        "workers": spawned_workers,
    },
    "experiments/evolution.md": {
        "pairs": evidence_pairs,
        "cifar10 by seed": lambda: best_first(evidence("cifar10")),
        "cifar100 by seed": lambda: best_first(evidence("cifar100")),
        "held out pairs": lambda: differences(held_out(), (), HELD_OUT_PAIRS),
        "held out by seed": lambda: [*best_first(held_out()), "", *best_first(held_out(fine=True))],
        "learned gates": learned_gates,
        "power": lambda: power(("",)),
    },
    "experiments/maps.md": {
        "replaced": lambda: replaced_maps(full="", narrow=""),
        "slower attention, 3 epochs": slower_attention_early,
        "slower attention, 10 epochs": slower_attention,
        "replaced, 60 epochs": lambda: replaced_maps(long=""),
        "probe": probe,
        "faithfulness": faithfulness,
    },
    "experiments/healthy_maps/README.md": {
        "norm": norm_effects,
        "trials": trials,
        "runs": long_runs,
        "entropies": entropies,
        "replaced": lambda: replaced_maps(
            norm="EA, 10 epochs with the norm",
            none_norm="AA, 10 epochs with the norm",
            pa_norm="PA, the shipped weights",
        ),
    },
    "experiments/collapse/README.md": {
        "cifar10 by seed": lambda: by_seed(collapse_top1("cifar10"), NETWORKS),
        "cifar10 differences": lambda: collapse_differences("cifar10"),
        "cifar10 looks": lambda: looks(collapse_top1("cifar10"), "cnn", "none", (4, 6, 9, 10)),
        "cifar100 by seed": lambda: by_seed(collapse_top1("cifar100"), NETWORKS),
        "cifar100 differences": lambda: collapse_differences("cifar100"),
        "cifar100 looks": lambda: looks(
            collapse_top1("cifar100"), "none + norm", "none", (3, 4, 5, 9, 10)
        ),
        "controls": controls,
        "break-even": lambda: break_evens(("none + norm - cnn", "none + norm - none")),
        "power": lambda: power(("query-key norm", "convolution and the norm")),
    },
    "experiments/collapse/controls.md": {
        "by seed": lambda: by_seed(
            controlled_top1(), ("none + norm", "cnn", "none", *collapse.CONTROLS)
        ),
        "differences": lambda: differences(
            controlled_top1(), collapse.CONTROLLED, collapse.CONTROLS_DESCRIBED, 0.01
        ),
        "halves": halves,
    },
    "experiments/cheap_attention/README.md": {
        "steps": cheap_steps,
        "pilot": cheap_pilot,
        "rates": cheap_rates,
        "by seed": cheap_top1,
        "answers": cheap_answers,
    },
    "experiments/added_attention/README.md": {
        "by seed": lambda: by_seed(added_top1(), ADDED),
        "differences": lambda: differences(added_top1(), ADDED_QUESTIONS, ADDED_AFTERWARDS),
        "break-even": lambda: break_evens(("aa - plain", "ea - plain")),
    },
}


def written(page: str, text: str) -> str:
    """Return a page's text with its tables written anew.

    Raises:
        UsageError: a marked table that TABLES lacks, or one of TABLES that the page lacks.
    """
    tables = TABLES[page]
    names = [name for _, name in MARKED.findall(text)]
    if sorted(names) != sorted(tables):
        raise UsageError(f"{page} must mark the tables {sorted(tables)}, it marks {sorted(names)}")
    return MARKED.sub(lambda match: match[1] + "\n".join(tables[match[2]]()) + "\n", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page differs"
    )
    check = parser.parse_args(argv).check
    stale = []
    for page in TABLES:
        path = HERE.parent / page
        before = path.read_text(encoding="utf-8")
        after = written(page, before)
        if after != before:
            stale.append(page)
            if not check:
                path.write_text(after, encoding="utf-8")
    if check and stale:
        raise UsageError(
            f"tables differ from the rows, `make pages` writes them: {', '.join(stale)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

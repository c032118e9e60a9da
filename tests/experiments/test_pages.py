"""The pages of experiments say what the files say: each figure that has a file is computed from it and looked for in
the section it belongs to, whatever words stand around it.

A function of the table `CLAIMS` yields (page, heading, its figures ...); what a page has in tables, it compares itself.
"""

import re
import statistics

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from experiments import published, sensitivity
from experiments.evidence import by_variant, holm, paired, read_runs, shown_p
from experiments.factorial import analyse
from experiments.healthy_maps.analyse import effects_of
from tests.experiments.pages import (
    RESULTS,
    ROOT,
    cells,
    last_row,
    page_says,
    points,
    rows_of,
    section,
    shown,
    span,
    spread,
    table,
    top1_of,
)

FACTORIAL, HEALTHY_RUNS = ROOT / "experiments" / "factorial", ROOT / "experiments" / "healthy_maps"
REST, SPEED = "all else: copies, layouts, sums, pooling", "Speed and memory on a CPU"
PAGE, HELP, OWE = (
    "docs/experiments.md",
    "Does evolving attention help?",
    "What the networks owe to their maps",
)
EVOLUTION, CIFAR, MAPS, KERNELS = (
    f"experiments/{name}.md" for name in ("evolution", "cifar", "maps", "kernels")
)
CELL, SCENES, TUNING, HEALTHY = (
    f"experiments/{name}/README.md"
    for name in ("factorial", "scenes", "finetune_scenes", "healthy_maps")
)
COLLAPSE = "Question 3: which findings were the collapse's?"
HEALED = "Question 6: does a network that looks at single pixels recover without a new training?"
SECOND_CYCLE = "Question 7: what does a second cycle bring the EA network?"
LONG = "Question 8: 60 epochs on a GPU"
SETS, KINDS = ("cifar10", "cifar100"), ("trained", "untrained", "shuffled")
AA, PA, EA = "conv_transformer_cifar", "pa_conv_transformer_cifar", "ea_conv_transformer_cifar"


def _with_error(row, score: str) -> str:
    return f"{row[score]:.3f} ± {row[f'{score}_se']:.3f}"


def by_seed(top1: pd.DataFrame) -> list[str]:
    """Return the variants' rows in the tables by seed."""
    return [cells(name, ", ".join(shown(of)), of.mean(), of.std()) for name, of in top1.items()]


# ---- does evolution help? --------------------------------------------------------------------------------------------


def the_question_by_seeds():
    """EA - none in the first seeds, the fresh ones and all ten, at equal time; PA beside none."""
    by_data = [published.seeds_of(data) for data in SETS]
    for seeds in by_data[0]:
        gains = [paired(of[seeds]["EA"] - of[seeds]["none"]) for of in by_data]
        yield PAGE, "", *(points(of, "+").rstrip(")") for of in gains)
        if seeds == "seeds 0 to 4":
            yield PAGE, HELP, *(f"{points(of, '+').rstrip(')')}, p = {of['p']:.3f}" for of in gains)
            yield (
                PAGE,
                HELP,
                *(points(paired(of[seeds]["PA"] - of[seeds]["none"])) for of in by_data),
            )
    logits = table("replaced-maps/full-logits.csv")
    assert logits[logits["model"].str.startswith("pa_")]["correlation"].min() >= 0.999


def the_tables_by_seed():
    for data in SETS:
        top1 = top1_of(f"evidence/{data}-runs.csv")
        gain, longer = paired(top1["EA"] - top1["none"]), top1["none 5 epochs"].mean()
        yield (
            EVOLUTION,
            "",
            *by_seed(top1),
            f"EA is {gain['difference']:.2f} points above none (95% interval "
            f"{gain['low']:.2f} to {gain['high']:.2f}",
            f"A fifth epoch brings none {longer - top1['none'].mean():.2f} points (interval",
            f"and puts it {longer - top1['EA'].mean():.2f} above EA (",
        )


def attention_against_convolution():
    """The plain convolution beside none and EA; EA beside none with the norm, and all pairs of CIFAR-10 pooled."""
    first = {data: top1_of(f"evidence/{data}-runs.csv") for data in SETS}
    versus = "Attention against convolution"
    for better, worse in (("cnn", "none"), ("EA", "cnn")):
        gains = [points(paired(of[better] - of[worse]), "+") for of in first.values()]
        yield PAGE, "", *gains
        yield PAGE, versus, *gains
    runs = pd.read_csv(HEALTHY_RUNS / "norm-runs.csv").query("data == 'cifar10'")
    norm = runs.pivot(index="seed", columns="network", values="top1")
    behind = paired(first["cifar10"]["cnn"] - first["cifar10"]["none"])
    five = published.seeds_of("cifar10")["5 to 9"]
    fresh_gain = paired(five["EA"] - five["none"])
    yield (
        "README.md",
        "",
        points(fresh_gain, "+"),
        f"{behind['difference']:.2f} points behind",
        span([behind["low"], behind["high"]]),
    )
    evolved = paired(norm["EA"] - norm["none"])
    yield PAGE, "", points(evolved)
    fresh = by_variant(read_runs(FACTORIAL / "cifar10-runs.csv"))
    pairs = [of["EA"] - of["none"] for of in (first["cifar10"], fresh, norm)]
    pooled = pd.concat(pairs)
    assert len(pooled) == 15
    yield PAGE, HELP, points(evolved), points(paired(pooled), "+")
    cnn = first["cifar10"]["cnn"]
    test = scipy.stats.ttest_ind(cnn, norm["none"], equal_var=False)
    low, high = test.confidence_interval()
    gap = {"difference": cnn.mean() - norm["none"].mean(), "low": low, "high": high}
    yield PAGE, "", points(gap, "+")
    yield PAGE, versus, f"none has {norm['none'].mean():.2f}%", f"cnn {cnn.mean():.2f}%"


def settings_compared_on_held_out_images():
    """With three seeds and their pairs; at 16x16, with two; slower attention and learned gates."""
    runs = read_runs(RESULTS / "evidence/cifar10-held-out-runs.csv")
    is_fine = runs["variant"].str.contains("16x16")
    top1, fine = by_variant(runs[~is_fine]), by_variant(runs[is_fine])
    pairs = rows_of(EVOLUTION, r"\| (EA[^|]*?) − ([^|]*) \| ([-\d.]+) \| ([-\d.]+ to [-\d.]+) \|")
    assert len(set(pairs)) == 7
    for first, second, difference, interval in pairs:
        assert f"{difference} ({interval})" == points(paired(top1[first] - top1[second]))
    ea, none = (" and ".join(shown(fine[f"{name} 16x16 too"])) for name in ("EA", "none"))
    yield EVOLUTION, "", *by_seed(top1), f"EA {ea}, none {none}."
    slower = paired(top1["EA slower attention"] - top1["none slower attention"])
    gates = table("evidence/learned-gates.csv")
    yield (
        PAGE,
        "Other settings of evolution",
        points(slower),
        span(gates["alpha"]),
        span(gates["beta"]).replace("to", "and"),
    )


def test_the_factorial(tmp_path):
    """The files are what the kept runs give, corrected as fixed before: Holm over four hypotheses, and two of time."""
    assert (
        analyse.main([*(str(FACTORIAL / f"{data}-runs.csv") for data in SETS), "-o", str(tmp_path)])
        == 0
    )
    kept = (FACTORIAL / "cifar10-runs.csv").read_text()
    assert (tmp_path / "cifar10-runs.csv").read_text() == kept
    made = pd.read_csv(tmp_path / "effects.csv")
    pd.testing.assert_frame_equal(made, pd.read_csv(FACTORIAL / "effects.csv"), rtol=1e-9)
    tested = made[made["p"].notna()]
    assert set(tested["seeds"]) == {"5 to 9"}
    for of, hypotheses in tested.groupby(tested["name"] == "EA - none equal time"):
        assert (
            len(hypotheses) == (2 if of else 4)
            and hypotheses["p_holm"].tolist() == holm(hypotheses["p"]).tolist()
        )
    (tmp_path / "few.csv").write_text("".join(kept.splitlines(True)[:2]))
    with pytest.raises(ValueError, match="seeds 5 to 9, no others|no runs of"):
        analyse.read_fresh(tmp_path / "few.csv")


def the_factorial():
    """Skip and convolution on the page, all rows beside the protocol."""
    effects = pd.read_csv(FACTORIAL / "effects.csv")
    rows = {(row["data"], row["name"], row["seeds"][:6]): row for row in effects.to_dict("records")}
    for name, seeds, heading in (
        ("convolution", "0 to 9", ""),
        ("skip", "0 to 9", ""),
        ("EA - none equal time", "5 to 9", ""),
        ("skip", "5 to 9", HELP),
    ):
        yield PAGE, heading, *(points(rows[data, name, seeds], "+") for data in SETS)
    paper = {
        row["label"]: row["top1"]["ImageNet"] for row in published.tables()["evolution"]["rows"]
    }
    yield (
        PAGE,
        HELP,
        f"{paper['ea_aa_resnet34'] - paper['ea_aa_resnet34, without convolution']:+.2f}",
        " and ".join(f"{rows[data, 'skip', '5 to 9']['p_holm']:.3f}" for data in SETS),
        " and ".join(f"{rows[data, 'convolution', '0 to 9']['high']:.2f}" for data in SETS),
    )
    earlier = {data: table(f"evidence/{data}-factors.csv").set_index("name") for data in SETS}
    for title, name in (
        ("skip connection", "skip"),
        ("convolution", "convolution"),
        ("interaction", "skip x convolution"),
    ):
        for label, both in (
            (title, [earlier[data].loc[name] for data in SETS]),
            (f"{title}, seeds 5 to 9", [rows[data, name, "5 to 9"] for data in SETS]),
        ):
            yield (
                CELL,
                "Results",
                f"| {label} | "
                + " | ".join(f"{points(one, '+')} | {shown_p(one['p'])}".rstrip() for one in both),
            )


def what_each_study_could_have_found():
    kept = table("sensitivity.csv")
    pd.testing.assert_frame_equal(sensitivity.table(), kept)
    found = shown(kept["found_at_80_percent"])
    yield (
        EVOLUTION,
        "What each study could have found",
        *(" | ".join(found[i : i + 2]) for i in (0, 2, 4)),
        *found[6:],
    )
    yield PAGE, "", f"{min(found[:6])} to {max(found[:6])} points"
    verdict = table("across/verdict.csv").query("part == 'vit-rival'")
    yield PAGE, "What each study could have found", span(verdict["found_at_80_percent"])


def equal_time():
    """By the measured ratio."""
    ratios = sorted(round(float(ratio), 3) for ratio in table("evidence/time-ratio.csv")["ratio"])
    r = statistics.median(ratios)
    updates = f"{round(1560 * r):,} updates"
    assert round(1560 * r) == round(390 * 4.256)
    yield CELL, "Equal time", ", ".join(map(str, ratios)), updates, "`--epochs 4.256`"
    yield PAGE, HELP, f"{r} times", updates


# ---- maps, and recipes of CIFAR-10 -----------------------------------------------------------------------------------


def replaced_maps():
    figures = pd.concat(
        [table(f"replaced-maps/{name}-replaced.csv") for name in ("full", "narrow")]
    )
    figures["network"] = figures["model"].str.replace(
        r".*variant=(.*),seed=\d|\.fast_c10", r"\1", regex=True
    )
    means = figures.groupby(["network", "maps"])["top1"].mean().unstack()
    yield (
        MAPS,
        "",
        *(
            cells(network, *row).replace(" nan |", " |")
            for network, row in means[
                ["trained", "uniform", "mean", "other", "none", "own"]
            ].iterrows()
        ),
    )
    slower = table("replaced-maps/attention-lr-replaced.csv")["top1"]
    yield MAPS, "", cells("that of the rest", *slower[:6]), cells("a quarter of it", *slower[6:])
    healthy, without, healed = (
        table(f"replaced-maps/{name}-replaced.csv").set_index("maps")["top1"]
        for name in ("norm", "none-norm", "pa-norm")
    )
    yield (
        PAGE,
        OWE,
        *means.loc[[EA, "EA"], ["trained", "other", "none"]].values.flat,
        means.own["EA"],
    )
    long, logits = (table(f"replaced-maps/long-{name}.csv") for name in ("replaced", "logits"))
    for name in (AA, EA):
        of = long.query(f"model == '{name}.long_c10'").set_index("maps")["top1"]
        yield PAGE, OWE, *of[["trained", "other", "none"]]
        yield PAGE, "", f"{of['trained'] - of['none']:.2f} ({'AA' if name == AA else 'EA'})"
        yield MAPS, "", cells(f"{name}, 60 epochs", *of), *(of["trained"] - of[["none", "other"]])
    of_evolved = logits.query("model.str.startswith('ea') and correlation < 1")["correlation"]
    yield MAPS, "", of["trained"] - of["own"], of_evolved.max()
    yield (
        HEALTHY,
        COLLAPSE,
        *healthy,
        *(healthy["trained"] - healthy[["none", "own"]]),
        *without,
        without["trained"] - without["none"],
    )
    yield PAGE, "", f"{healed['trained'] - healed['none']:.2f} (PA)"
    yield (
        HEALTHY,
        HEALED,
        *healed,
        healed["trained"] - healed["none"],
        means.loc[PA, "trained"] - means.loc[PA, "none"],
    )
    lost = means["trained"] - means["none"]
    yield (
        PAGE,
        "",
        f"{lost[EA]:.1f}",
        span(lost[["none", "PA", "EA", "EA without skip", "EA without convolution"]], 0)
        + " points",
    )


def slower_attention():
    for rate, runs, maps in (
        ("that of the rest", "fast-cifar10", "full"),
        ("a quarter of it", "attention-lr-cifar10", "attention-lr-10-epochs"),
    ):
        figures = table(f"replaced-maps/{maps}-replaced.csv")
        for name in (AA, EA):
            last = last_row(f"{runs}/{name}.csv")
            start = re.escape(cells(name, rate, last["top1"]))
            end = re.escape(
                cells("", *figures[figures["model"].str.match(rf"{name}\b")]["top1"])[3:]
            )
            assert rows_of(MAPS, rf"{start} [\d.]+ {end}.*")
            yield MAPS, "", f"{last['train_loss']:.4f}"


def the_recipes_of_ten_epochs():
    """The page's table and the recipe's own words have the figures of its runs."""
    for recipe, row in (
        ("fast-sgd", r"\| (\w+_cifar) +\| [\d.]+ +\| ([\d.]+) +\| ([\d.]+) +\| \d+ ()().*"),
        (
            "fast",
            r"\| (\w+_cifar) \| [\d.]+ \| ([\d.]+) \|(?: [\d.]+)? \| ([\d.]+) \| ([\d.]+) \| \d+ \|",
        ),
    ):
        runs = {path.stem: last_row(path) for path in (RESULTS / f"{recipe}-cifar10").glob("*.csv")}
        found = {name: figures for name, *figures in rows_of(CIFAR, row)}
        assert found.keys() == runs.keys()
        file = f"ea_vision/recipes/{recipe.replace('-', '_')}.yaml"
        for name, (top1, top5, *loss) in found.items():
            assert [float(top1), float(top5)] == runs[name][["top1", "top5"]].tolist() and runs[
                name
            ]["epoch"] == 10
            assert not loss[0] or loss[0] == f"{runs[name]['train_loss']:.4f}"
            assert re.search(rf"{top1}[^(]{{0,40}} \({name}\)", section(file)), name
            yield file, "", top1


def cifar10():
    """The full networks, maps of the shipped ones, the optimisers' parameters, widths, positions and shares."""
    top1 = [last_row(f"fast-cifar10/{name}.csv")["top1"] for name in ("cnn_cifar", AA, PA, EA)]
    kinds = ("`cnn_cifar` has", "AA", "PA", "EA")
    yield PAGE, "CIFAR-10", *(f"{kind} {of:.2f}" for kind, of in zip(kinds, top1, strict=True))
    yield PAGE, "", span(top1, 1) + "%"
    figures = table("shipped-entropy.csv")
    yield PAGE, "CIFAR-10", span(figures["entropy_share"]), span(figures["largest"])
    muon, adamw = table("muon-parameters.csv")[["muon_tensors", "adamw_tensors"]].sum()
    trials = (
        table("recipe-search/trials.csv")
        .set_index("trial")["held_out_top1_by_epoch"]
        .str.split()
        .str[-1]
    )
    base, changed = (
        [trials[name], trials[f"{name}-seed1"]] for name in ("t1-base", "t2-tables-classifier")
    )
    yield (
        CIFAR,
        "CIFAR-10",
        f"{muon} of the EA network's {muon + adamw} parameters",
        " and ".join(changed),
        " and ".join(base),
    )
    wide = table("wrn16-4-short.csv").groupby("model")["held_out_top1"].mean()
    yield CIFAR, "", f"{wide['wrn28_10_cifar'] - wide['aa_wrn28_10_cifar']:.1f} points"
    for name in ("share", "position"):
        for row in table(f"ablation/{name}.csv").itertuples():
            figures = [
                row.position if name == "position" else f"{row.share:g}",
                f"{row.params_m:.3f}",
                f"{row.mflops_profiler:.1f}",
                f"{row.held_out_top1:.2f}",
                f"{row.train_loss:.3f}",
            ]
            assert rows_of(CIFAR, r"\| " + r" +\| ".join(map(re.escape, figures)) + r" +\|"), (
                figures
            )


# ---- scenes ----------------------------------------------------------------------------------------------------------


def scenes():
    """The table in docs, beside the protocol and on the cards; copies among the test photos."""
    for row in table("scenes/results.csv", dtype=str).to_dict("records"):
        kind = row["model"].partition("_")[0].upper().replace("RESNET34", "plain")
        yield PAGE, "Scenes", f"{kind} {row['top1']}"
        yield (
            SCENES,
            "",
            cells(
                *(row[name] for name in ("model", "validation_top1", "top1", "interval", "minutes"))
            ),
        )
        last = last_row(f"scenes/{row['model']}.csv")
        assert last["epoch"] == 10 and f"{last['top1']:.2f}" == row["validation_top1"]
        if f"`{row['model']}`" in section("README.md"):
            yield "README.md", "", f"{float(row['top1']):.1f} (10)"
    copies, without = table("scenes/copies.csv"), table("scenes/copies-top1.csv").set_index("model")
    other = sum(row.test.split("/")[0] != row.train.split("/")[0] for row in copies.itertuples())
    known = f"{len(copies)} of the 2,534"
    yield PAGE, "Scenes", known, f"{other} of them", *without["new_top1"]
    for name, row in without.iterrows():
        yield f"weights/{name}.md", "", f"{row.top1:.2f}% top-1", known, f"{row.new_top1:.2f}%"


def quarter_width_networks_and_tuning_on_scenes():
    top1, tuning = top1_of("scenes/quarter-width-runs.csv"), top1_of("scenes/fine-tuning-runs.csv")
    plain, aa, taught = (
        paired(top1[a] - top1[b]) for a, b in (("EA", "plain"), ("EA", "AA"), ("taught", "plain"))
    )
    assert holm([plain["p"], aa["p"]]).tolist() == [1.0, 1.0]
    tuned, scratch = tuning["fine-tuned"], tuning["from scratch"]
    yield (
        SCENES,
        "",
        *(cells(variant, *values, values.mean()) for variant, values in top1.items()),
        *(f"({of['low']:.2f} to {of['high']:.2f}" for of in (plain, aa, taught)),
        f"mean {tuned.mean():.2f}",
        scratch[0],
        points(paired(tuned - scratch)).replace(" ", " points ", 1).rstrip(")"),
    )
    yield (
        PAGE,
        "Scenes",
        *(f"{name} {top1[name].mean():.2f}" for name in ("plain", "AA", "EA")),
        points(aa, "+"),
        f"{top1['taught'].mean():.2f}, p = {taught['p']:.3f}",
    )
    yield PAGE, "", points(plain), points(taught)
    yield "docs/imagenet.md", "", f"{taught['difference']:+.2f} points"
    yield "docs/fine-tune.md", "", tuned.mean(), scratch[0]


def what_maps_of_scenes_tell():
    found = (
        table("probe/scenes/results.csv").groupby(["model", "maps", "layer"])["top1"].apply(spread)
    )
    faithful = table("faithfulness/scenes/results.csv").set_index(["ranking", "model"])
    networks = ("aa_resnet34_050", "ea_aa_resnet34_050")
    yield (
        SCENES,
        "",
        *(
            cells(network, maps, *(found[network, maps, layer] for layer in (16, 17, 18)))
            for network in networks
            for maps in KINDS
        ),
    )
    yield (
        SCENES,
        "",
        *(
            cells(
                ranking,
                *(
                    _with_error(faithful.loc[(ranking, network)], score)
                    for score in ("comprehensiveness", "sufficiency")
                    for network in networks
                ),
            )
            for ranking in faithful.index.unique("ranking")
        ),
    )


def captions_of_pictures():
    """A scene's houses and road, and the cat's eyes in the maps of a pretrained transformer."""
    maps = np.load(RESULTS / "scenes" / "scene.npz")["attn"].reshape(8, 2, 14, 14)
    for part, thing in (
        (maps[7, :, 2:6], "of its attention on the lit houses"),
        (maps[5, :, 7:], "on the road"),
    ):
        yield PAGE, "Scenes", f"{span(100 * part.sum((1, 2)), 0)}% {thing}"
    kept = {
        name: maps.astype(float) for name, maps in np.load(RESULTS / "pretrained-maps.npz").items()
    }
    eyes = np.mean(
        [
            kept["cls"][..., 9:16, 6:14].mean((-2, -1)),
            kept["cls"][..., 11:18, 24:30].mean((-2, -1)),
        ],
        0,
    )
    yield TUNING, "", f"{eyes[5]:.1f} times", span(np.delete(eyes, 5), 1) + " times"

    def moved(first: str, second: str) -> np.ndarray:
        one, other = (kept[way] / kept[way].sum((1, 2), keepdims=True) for way in (first, second))
        return 50 * np.abs(one - other).sum((1, 2))

    for moves in ([*moved("before", "plain"), *moved("before", "gates")], moved("plain", "gates")):
        yield TUNING, "", span(moves, 0) + "%"


def fine_tuning_of_a_pretrained_transformer_on_scenes():
    ways = {
        "plain": "Plain it has",
        "gates": "EA whose gates learn from 0",
        "residual": "residual maps",
        "conv2d": "conv2d",
    }
    top1 = top1_of("finetune-scenes-runs.csv")
    gains = {way: paired(top1[way] - top1["plain"]) for way in ways if way != "plain"}
    p = holm([gain["p"] for gain in gains.values()])
    maps = (
        table("finetune-scenes-maps.csv")
        .query("layer == 12")
        .groupby("model")[["entropy_share", "distance_pixels"]]
        .mean()
        .loc[["before", "plain", "gates"]]
    )
    yield (
        TUNING,
        "",
        *(cells(f"`{way}`", *top1[way], top1[way].mean()) for way in ways),
        *(f"({of['low']:.2f} to {of['high']:.2f})" for of in gains.values()),
        f"{p[0]:.2f}, {p[1]:.2f} and {p[2]:.2f}",
        *maps.entropy_share,
        *(f"{distance:.0f}" for distance in maps.distance_pixels),
    )
    kept = table("finetune-scenes-runs.csv")[["alpha", "beta"]].stack().dropna()
    gates = [abs(float(value)) for values in kept for value in values.split(" to ")]
    yield (
        PAGE,
        "Tuning a vision transformer",
        *(f"{name} {spread(top1[way])}" for way, name in ways.items()),
        points(gains["conv2d"]),
        f"within {max(gates):.2f} of 0",
    )
    yield PAGE, "", points(gains["gates"])


# ---- healthy maps ----------------------------------------------------------------------------------------------------


def the_trials_of_healthy_maps_and_what_the_norm_costs_so_far():
    trials, runs, effects = (
        pd.read_csv(HEALTHY_RUNS / f"{name}.csv")
        for name in ("trials", "norm-runs", "norm-effects")
    )
    first, second = trials["held_out_top1"][:2]
    entropies = trials.filter(like="entropy_").stack()
    assert 0.55 <= second - first < 0.565
    yield (
        HEALTHY,
        "",
        f"({first:.2f} to {second:.2f}%)",
        "0.55 points",
        f"entropies are {entropies.min()} to {entropies.max()} of log N",
    )
    pd.testing.assert_frame_equal(effects_of(runs), effects)
    repeats = pd.read_csv(HEALTHY_RUNS / "norm-repeats.csv").set_index("seed")["top1"]
    none = runs.query("network == 'none'").set_index("seed")
    changed = none["top1"] - none["without_norm"].where(none.index != 5, repeats[5])
    assert repeats[6] == none.loc[6, "without_norm"], "to the digit"
    yield (
        HEALTHY,
        "Question 1: does the norm cost or bring accuracy?",
        *(f"{of:.2f}%" for of in repeats[:1]),
        f"where {none.loc[5, 'without_norm']} is recorded",
        points(paired(changed, 0.01)).replace(" (", ", ")[:-1],
    )
    of_norm = runs.filter(like="entropy").stack().sort_values()
    yield (
        HEALTHY,
        "Question 1: does the norm cost or bring accuracy?",
        of_norm.iloc[-1],
        f"{span(of_norm[:-1])} of",
        *(points(row, "+") for row in effects.to_dict("records")),
    )


def the_runs_with_the_norm():
    """Of the former weights, and PA's: bfloat16 and entropies; where no card has them, as stored and with six views."""
    entropies = pd.read_csv(HEALTHY_RUNS / "former-entropy.csv")
    figures = pd.read_csv(HEALTHY_RUNS / "former-accuracy.csv", dtype=str).set_index("run")
    for name, heading, run in (
        (EA, COLLAPSE, EA),
        (EA, SECOND_CYCLE, "ea_second_cycle"),
        (AA, COLLAPSE, AA),
        (PA, HEALED, PA),
    ):
        last = pd.read_csv(HEALTHY_RUNS / f"{run}.csv").iloc[-1]
        yield (
            HEALTHY,
            heading,
            f"{last['top1']:.2f}% in bfloat16",
            f"training loss {last['train_loss']:.4f}",
        )
        if run != PA:
            stored, views = figures.loc[run, ["stored", "six_views"]]
            yield HEALTHY, heading, f"in bfloat16, {stored} as stored", f"with six views {views}"
        if run in (EA, AA):
            before = "six views " if run == EA else ""
            yield "ea_vision/recipes/fast.yaml", "", f"{last['top1']:.2f}, {before}{views} ({name})"
        if run != EA:  # of which the second cycle's are
            shares = entropies.query(f"model == '{name}.fast_norm_c10'")["entropy_share"]
            yield HEALTHY, heading, ", ".join(shown(shares[:5]))
            assert shares.min() >= 0.25, "the rule"


def the_shipped_networks():
    """Those of the long runs and PA's: bfloat16, as stored, six views, entropies, and the rule that they met."""
    long = [
        (name, LONG, pd.read_csv(HEALTHY_RUNS / f"{run}_long.csv").iloc[-1], "long_c10", said)
        for name, run, said in (
            (EA, "ea", "EA {:.2f} and {}"),
            (AA, "none", "AA has {:.2f}%, six views {}"),
        )
    ]
    pa = pd.read_csv(HEALTHY_RUNS / f"{PA}.csv").iloc[-1]
    for name, heading, last, tag, said in (
        *long,
        (PA, HEALED, pa, "fast_norm_c10", "{:.2f} and {}"),
    ):
        stored, views = re.findall(
            r"(\d\d\.\d\d)%(?: top-1,|\. 10000)", section(f"weights/{name}.{tag}.md")
        )
        shares = table("shipped-entropy.csv").query(f"model == '{name}.{tag}'")["entropy_share"]
        yield (
            HEALTHY,
            heading,
            f"{last['top1']:.2f}% in bfloat16, {stored} as stored",
            f"with six views {views}",
            f"training loss {last['train_loss']:.4f}",
            ", ".join(shown(shares[:5])),
        )
        assert shares.min() >= 0.19, "the rule"
        yield PAGE, "CIFAR-10", said.format(last["top1"], views)
    recipe, hundred = (
        "ea_vision/recipes/cifar_long.yaml",
        pd.read_csv(HEALTHY_RUNS / "ea_long_cifar100.csv").iloc[-1],
    )
    for name, _, last, *_ in long:
        yield recipe, "", f"{last['top1']:.2f} ({name})"
        yield "README.md", "", f"CIFAR-10 {last['top1']:.2f} ({last['epoch']:.0f})"
    yield recipe, "", f"--epochs {hundred['epoch']:.0f}: {hundred['top1']:.2f}"
    yield "README.md", "", f"CIFAR-100 {hundred['top1']:.2f} ({hundred['epoch']:.0f})"
    yield HEALTHY, LONG, f"{hundred['top1']:.2f}%", f"training loss {hundred['train_loss']:.4f}"


# ---- the probe, faithfulness, detection, speed -----------------------------------------------------------------------


def the_probe_and_faithfulness():
    """Of the shipped weights and of the former, whose maps had collapsed; the probe's mean and deviation of 3 seeds."""
    found = pd.concat([table(f"probe/{name}.csv") for name in ("results", "former")])
    found = found.groupby(["model", "maps", "layer"])["top1"]
    rows, unseen = found.apply(spread), found.mean()
    models = {"AA": f"{AA}.long_c10", "PA": f"{PA}.fast_norm_c10", "EA": f"{EA}.long_c10"}
    for maps in KINDS:
        yield (
            MAPS,
            "",
            *(
                f"| {name} | {maps} | "
                + " | ".join(
                    rows[of, maps, layer]
                    for of in (model, f"{model.partition('.')[0]}.fast_c10")
                    for layer in (3, 6)
                )
                for name, model in models.items()
            ),
        )
    faithful = table("faithfulness/results.csv").set_index(["ranking", "model"])
    for scores in (("comprehensiveness", "sufficiency"), ("deletion", "insertion")):
        for ranking in faithful.index.unique("ranking"):
            yield (
                MAPS,
                "Faithfulness",
                cells(
                    ranking,
                    *(
                        _with_error(faithful.loc[(ranking, model)], score)
                        for score in scores
                        for model in models.values()
                    ),
                ),
            )
    faithful = faithful["comprehensiveness"]
    yield (
        PAGE,
        "The probe",
        *(
            unseen[model, maps, layer]
            for model in models.values()
            for maps in KINDS[:2]
            for layer in (3, 6)
        ),
    )
    yield (
        PAGE,
        "Faithfulness",
        *(f"{faithful['layer 6', model]:.3f}" for model in models.values()),
        *(
            ", ".join(f"{faithful[ranking, model]:.3f}" for model in models.values())
            for ranking in ("centre", "random")
        ),
    )


def detectors():
    for name, label in (
        ("plain", "resnet18"),
        ("aa", "aa_resnet34, two blocks a stage"),
        ("ea_aa", "ea_aa_resnet34, two blocks a stage"),
    ):
        runs = pd.DataFrame([last_row(f"detection/{name}-seed{seed}.csv") for seed in (0, 1)])
        figures = [
            text
            for of in (runs["AP"], runs["AP50"])
            for text in (", ".join(f"{x:.1f}" for x in of), f"{of.mean():.1f}")
        ]
        yield "experiments/detection.md", "", cells(label, *figures, f"{runs['AP75'].mean():.1f}")


def smaller_experiments():
    tiny = (
        table("tiny-imagenet/attention.csv").query("images == 160").groupby("run")["top1"].mean()
        + 1e-9
    )
    digits = table("moved-digits.csv").groupby("transform")["top1"].mean()
    yield (
        PAGE,
        "Smaller experiments",
        f"{tiny['resnet34']:.1f}%",
        *(
            f"{kind} {tiny[name]:.1f}"
            for kind, name in (
                ("AA", "aa_resnet34"),
                ("PA", "pa_aa_resnet34"),
                ("EA", "ea_aa_resnet34"),
            )
        ),
        *(f"{top1:.2f}%" for top1 in digits),
    )
    kept = table("widths/misses.csv")
    best = kept.groupby("kind")["largest_miss_percent"].min()
    yield (
        "docs/results.md",
        "",
        f"{best['doubled']:.0f}%",
        f"{best['rising']:.1f}%",
        f"{best['any']:.1f}%",
        f"{kept['cnn_params_m'][1]:.1f}M parameters",
    )


def speed():
    for row in (
        table("benchmark-cpu.csv").query("part == 'network' and mode == 'eager'").itertuples()
    ):
        yield (
            PAGE,
            SPEED,
            *(
                (row.train_images_per_s, row.infer_images_per_s, f"{row.memory_mib:.0f}")
                if row.model == "resnet50"
                else [cells(row.model, row.train_ratio, row.infer_ratio, row.memory_ratio)]
            ),
        )
    for row in table("recording-cost.csv").itertuples():
        yield (
            "docs/record.md",
            "Cost",
            cells(
                f"`{row.network}`", row.plain_s + 1e-6, row.recorded_s + 1e-6, f"{row.maps_mib:.1f}"
            ),
        )


def large_maps():
    """The networks at 640 pixels, and the parts of a layer."""
    assert rows_of(
        "docs/kernels.md", r"\| .* \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|", "Large images"
    ) == [
        (*shown([infer + 1e-6, train + 1e-6]), f"{mib:,.0f}")
        for *_, infer, train, mib in table("large-maps.csv").itertuples(index=False)
    ]
    sizes = table("large-maps-sizes.csv").set_index(["malloc", "code"])
    for of in (sizes.loc["kept", "after"], sizes.loc["kept", "before"]):
        for *_, infer, train, mib in of[of["network"] != "resnet50"].itertuples(index=False):
            memory = "" if np.isnan(mib) else f"; {mib:,.0f}"
            yield KERNELS, "Networks by image size", f"| {infer:.2f}, {train:.2f}{memory} |"
    yield (
        KERNELS,
        "Networks by image size",
        *(
            sizes[sizes["network"] == "ea"].loc[malloc, code]["training, ratio"].item()
            for malloc, code in (("as it is", "before"), ("kept by environment", "after, in place"))
        ),
    )
    ratios = ["inference, ratio", "training, ratio"]
    levels = sizes.loc["kept"].loc[["second level", "first level"]]
    for network, name in (("aa", "aa"), ("pa", "pa_aa"), ("ea", "ea_aa")):
        of = levels[levels["network"] == network].sort_values("size", kind="stable")[ratios]
        yield (
            KERNELS,
            "Networks by image size",
            cells(f"{name}_resnet50", *(", ".join(shown(pair)) for pair in of.to_numpy())),
        )
    limit = sizes.loc["kept", "limit"].set_index("network")
    left, taken = limit.loc["aa without attention"], limit.loc["aa"]
    yield (
        KERNELS,
        "Networks by image size",
        *(" and ".join(shown(of[ratios])) for of in (left, taken)),
        *(
            f"{2000 * limit.loc['resnet50', time] * (1 / goal - 1 / left[ratio]):.0f}"
            for goal, ratio, time in zip(
                (0.89, 0.86), ratios, ("inference, s", "training, s"), strict=True
            )
        ),
        *(f"{2000 * (taken[time] - left[time]):.0f}" for time in ("inference, s", "training, s")),
    )
    for row in table("h200-steps.csv").itertuples(index=False):
        yield KERNELS, "On an H200", cells(f"{row.network}, {row.batch}", *row[2:])
    parts = table("large-maps-parts.csv").pivot(
        index="part", columns=["pixels", "pass"], values="ms"
    )
    for part, ms in parts.iterrows():
        yield (
            KERNELS,
            "Parts of a layer on a CPU",
            f"| {part} | "
            + " | ".join(
                f"{ms[n, 'forward']:.1f} {'-' if ms[n, 'backward'] < 0 else '+'} "
                f"{abs(ms[n, 'backward']):.1f}"
                for n in (196, 400, 784)
            ),
        )


def the_profile_of_deployed_networks():
    profile = table("onnx-profile.csv").set_index("operation")
    kinds = {
        "convolutions, also of maps": ["Conv"],
        "products": ["MatMul", "FusedMatMul"],
        "softmax": ["Softmax"],
    }
    sums = {name: profile.loc[of].sum() for name, of in kinds.items()}
    sums |= {REST: profile.sum() - sum(sums.values()), "all": profile.sum()}
    figures = {name: [f"{time + 1e-6:.0f}" for time in times] for name, times in sums.items()}
    yield KERNELS, "", *(cells(name, *times) for name, times in figures.items())
    yield "docs/deploy.md", "Speed", *figures["all"]


CLAIMS = [
    the_question_by_seeds,
    the_tables_by_seed,
    attention_against_convolution,
    settings_compared_on_held_out_images,
    the_factorial,
    what_each_study_could_have_found,
    equal_time,
    replaced_maps,
    slower_attention,
    the_recipes_of_ten_epochs,
    cifar10,
    scenes,
    quarter_width_networks_and_tuning_on_scenes,
    what_maps_of_scenes_tell,
    captions_of_pictures,
    fine_tuning_of_a_pretrained_transformer_on_scenes,
    the_trials_of_healthy_maps_and_what_the_norm_costs_so_far,
    the_runs_with_the_norm,
    the_shipped_networks,
    the_probe_and_faithfulness,
    detectors,
    smaller_experiments,
    speed,
    large_maps,
    the_profile_of_deployed_networks,
]


@pytest.mark.parametrize("claims", CLAIMS)
def test_the_pages_say_what_the_files_say(claims):
    said = [*claims()]
    assert said
    for page, heading, *figures in said:
        page_says(page, heading, *figures)

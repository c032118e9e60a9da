"""The pages of experiments agree with the files: each figure is computed from its file and must occur in its section,
in any wording.

Each generator yields (page, heading, figures ...); tables are written by experiments/pages.py.
"""

import re
import statistics
from inspect import isgeneratorfunction

import numpy as np
import pandas as pd
import pytest

from ea_vision.__main__ import main
from ea_vision.engine.config import load_recipe
from experiments import break_even, pages, published, sensitivity
from experiments.collapse import analyse as collapse
from experiments.collapse.run import CONTROLS, SEEDS
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
from tests.refused import refused

FACTORIAL = ROOT / "experiments" / "factorial"
HEALTHY_RUNS = ROOT / "experiments" / "healthy_maps"
PAGE = "docs/experiments.md"
HELP = "Does evolving attention help?"
VERSUS = "Attention against convolution"
OWE = "What the networks owe to their maps"
EVOLUTION = "experiments/evolution.md"
CIFAR = "experiments/cifar.md"
MAPS = "experiments/maps.md"
KERNELS = "experiments/kernels.md"
CELL = "experiments/factorial/README.md"
SCENES = "experiments/scenes/README.md"
TUNING = "experiments/finetune_scenes/README.md"
ADDED = "experiments/added_attention/README.md"
COLLAPSED = "experiments/collapse/README.md"
SETS = ("cifar10", "cifar100")
SETS_NAMED = ("CIFAR-10", "CIFAR-100")
AA = "conv_transformer_cifar"
PA = "pa_conv_transformer_cifar"
EA = "ea_conv_transformer_cifar"


def open_points(of, plus=""):
    """Return `points` without the last bracket."""
    return points(of, plus).rstrip(")")


# ---- does evolution help? --------------------------------------------------------------------------------------------


def the_question_by_seeds():
    """EA - none in the first seeds, the fresh ones and all ten, at equal time; PA beside none."""
    for data in SETS:
        for seeds, top1 in published.seeds_of(data).items():
            gain = paired(top1["EA"] - top1["none"])
            yield PAGE, "", open_points(gain, "+")
            if seeds == "seeds 0 to 4":
                yield PAGE, HELP, f"{open_points(gain, '+')}, p = {gain['p']:.3f}"
    logits = table("replaced-maps/full-logits.csv")
    is_pa = logits["model"].str.startswith("pa_")
    assert logits[is_pa]["correlation"].min() >= 0.999


def top1_of_the_ea_paper():
    """Return top-1 on ImageNet by network."""
    rows = published.tables()["evolution"]["rows"]
    return {row["label"]: row["top1"]["ImageNet"] for row in rows}


def attention_against_convolution():
    """The plain convolution beside none and EA; EA beside none with the norm, and all pairs of CIFAR-10 pooled."""
    first = {data: top1_of(f"evidence/{data}-runs.csv") for data in SETS}
    for top1 in first.values():
        yield PAGE, "", points(paired(top1["cnn"] - top1["none"]), "+")
    runs = pd.read_csv(HEALTHY_RUNS / "norm-runs.csv").query("data == 'cifar10'")
    norm = runs.pivot(index="seed", columns="network", values="top1")
    five = published.seeds_of("cifar10")["5 to 9"]
    yield "README.md", "Results", points(paired(five["EA"] - five["none"]), "+")
    evolved = paired(norm["EA"] - norm["none"])
    yield PAGE, "", points(evolved)
    fresh = by_variant(read_runs(FACTORIAL / "cifar10-runs.csv"))
    pooled = pd.concat([of["EA"] - of["none"] for of in (first["cifar10"], fresh, norm)])
    assert len(pooled) == 15
    yield PAGE, HELP, points(evolved), points(paired(pooled), "+")
    gain = published.figures(PA)["top1"]["CIFAR-10"] - published.figures(AA)["top1"]["CIFAR-10"]
    assert paired(pooled)["high"] < gain
    paper = top1_of_the_ea_paper()
    ea_gain = paper["ea_aa_resnet34"] - paper["aa_resnet34"]
    assert paired(pooled)["high"] < ea_gain
    yield PAGE, HELP, f"gains: {gain:+.2f} of PA, {ea_gain:+.2f} of EA"
    cnn = first["cifar10"]["cnn"].mean()
    yield COLLAPSED, "", f"none has {norm['none'].mean():.2f}% on CIFAR-10 where cnn has {cnn:.2f}"


def test_the_factorial(tmp_path):
    """The files follow from the kept runs, corrected as fixed before: Holm over four hypotheses, and two of time."""
    files = [str(FACTORIAL / f"{data}-runs.csv") for data in SETS]
    assert analyse.main([*files, "-o", str(tmp_path)]) == 0
    kept = (FACTORIAL / "cifar10-runs.csv").read_text()
    assert (tmp_path / "cifar10-runs.csv").read_text() == kept
    effects = pd.read_csv(tmp_path / "effects.csv")
    pd.testing.assert_frame_equal(effects, pd.read_csv(FACTORIAL / "effects.csv"), rtol=1e-9)
    tested = effects[effects["p"].notna()]
    assert set(tested["seeds"]) == {"5 to 9"}
    for of_time, hypotheses in tested.groupby(tested["name"] == "EA - none equal time"):
        assert len(hypotheses) == (2 if of_time else 4)
        assert hypotheses["p_holm"].tolist() == holm(hypotheses["p"]).tolist()
    (tmp_path / "few.csv").write_text("".join(kept.splitlines(True)[:2]))
    with refused("seeds 5 to 9, no others|no runs of", ValueError):
        analyse.read_fresh(tmp_path / "few.csv")
    (tmp_path / "fresh-cifar100.csv").write_text(kept)
    with refused("must begin with cifar10 or cifar100, got .*fresh"):
        analyse.main([str(tmp_path / "fresh-cifar100.csv"), "-o", str(tmp_path)])


def the_factorial():
    """Skip and convolution on the page, all rows beside the protocol."""
    effects = pd.read_csv(FACTORIAL / "effects.csv").to_dict("records")
    rows = {(row["data"], row["name"], row["seeds"][:6]): row for row in effects}
    for data in SETS:
        yield PAGE, "", points(rows[data, "convolution", "0 to 9"], "+")
        yield PAGE, "", points(rows[data, "skip", "0 to 9"], "+")
        yield PAGE, "", points(rows[data, "EA - none equal time", "5 to 9"], "+")
    paper = top1_of_the_ea_paper()
    gain = paper["ea_aa_resnet34"] - paper["ea_aa_resnet34, without convolution"]
    yield PAGE, HELP, f"{gain:+.2f}"
    highest = [f"{rows[data, 'convolution', '0 to 9']['high']:.2f}" for data in SETS]
    yield PAGE, HELP, " and ".join(highest)
    earlier = {data: table(f"evidence/{data}-factors.csv").set_index("name") for data in SETS}
    flat = [f"{earlier[data].loc['convolution', 'difference']:.2f}" for data in SETS]
    before = [f"{earlier[data].loc['skip', 'difference']:+.2f}" for data in SETS]
    yield CELL, "", f"skip {before[0]} points", f"{before[1]} on CIFAR-100"
    yield CELL, "", f"convolution {flat[0]} and {flat[1]}"
    titles = {
        "skip": "skip connection",
        "convolution": "convolution",
        "skip x convolution": "interaction",
    }
    for name, title in titles.items():
        before = [earlier[data].loc[name] for data in SETS]
        fresh = [rows[data, name, "5 to 9"] for data in SETS]
        yield CELL, "Results", _effects_row(title, before)
        yield CELL, "Results", _effects_row(f"{title}, seeds 5 to 9", fresh)


def _effects_row(label, effects):
    """Return the beginning of a row in the table of effects, one effect for each data set."""
    row = f"| {label}"
    for effect in effects:
        row += f" | {points(effect, '+')} | {shown_p(effect['p'])}".rstrip()
    return row


def what_each_study_could_have_found():
    heading = "What each study could have found"
    finds = shown(sensitivity.table()["found_at_80_percent"])
    yield PAGE, "", f"{min(finds[:6])} to {max(finds[:6])} points"
    yield PAGE, heading, f"{finds[10]} and {finds[11]} in SST"
    norm, convolution = finds[13], finds[15]
    yield (
        PAGE,
        heading,
        f"norm on CIFAR-100 they find {norm} (against the convolution {convolution})",
    )
    verdict = table("across/verdict.csv").query("part in ('vit-rival', 'second-updates')")
    yield PAGE, heading, f"small ViT {span(verdict['found_at_80_percent'])}"


def equal_time():
    """The measured ratio."""
    measured = table("evidence/time-ratio.csv")["ratio"]
    ratios = sorted(round(float(ratio), 3) for ratio in measured)
    ratio = statistics.median(ratios)
    updates = round(1560 * ratio)
    assert updates == round(390 * 4.256)
    each = ", ".join(map(str, ratios))
    yield CELL, "Equal time", each, f"{updates:,} updates", "`--epochs 4.256`"
    yield PAGE, HELP, f"{ratio} times", f"{updates:,} updates and EA 1,560"
    yield EVOLUTION, "", f"{ratio} times"


# ---- maps, and recipes of CIFAR-10 -----------------------------------------------------------------------------------


def replaced_maps():
    """What docs say of networks without maps; PA's logits, and collapsed maps that are hardly used."""
    means = _replaced_means()
    lost = means["trained"] - means["none"]
    narrow = lost[["none", "PA", "EA", "EA without skip", "EA without convolution"]]
    yield PAGE, "", f"{lost[EA]:.1f}", f"{span(narrow, 0)} points"
    healed = _replaced("pa-norm")
    yield PAGE, "", f"{healed['trained'] - healed['none']:.2f} (PA)"
    for name, short in ((AA, "AA"), (EA, "EA")):
        top1 = _replaced("long", f"{name}.long_c10")
        yield PAGE, OWE, *top1[["trained", "other", "none"]]
        yield PAGE, "", f"{top1['trained'] - top1['none']:.2f} ({short})"


def _replaced_means():
    """Return mean top-1 by network and kind of replaced maps."""
    files = [table(f"replaced-maps/{name}-replaced.csv") for name in ("full", "narrow")]
    figures = pd.concat(files)
    run = r".*variant=(.*),seed=\d|\.fast_c10"
    figures["network"] = figures["model"].str.replace(run, r"\1", regex=True)
    top1 = figures.groupby(["network", "maps"])["top1"]
    return top1.mean().unstack()


def _replaced(name, model=""):
    """Return top-1 by kind of replaced maps."""
    figures = table(f"replaced-maps/{name}-replaced.csv").set_index("maps")
    return figures[figures["model"].str.startswith(model)]["top1"]


def the_recipes_of_ten_epochs():
    """The recipe's own words have the figures of its runs."""
    for recipe in ("fast_sgd", "fast"):
        file = f"ea_vision/recipes/{recipe}.yaml"
        for path in (RESULTS / f"{recipe.replace('_', '-')}-cifar10").glob("*.csv"):
            run = last_row(path)
            assert run["epoch"] == 10
            top1 = f"{run['top1']:.2f}"
            assert re.search(rf"{top1}[^(]{{0,40}} \({path.stem}\)", section(file)), path.stem
            yield file, "", top1


def cifar10():
    """The full networks, the optimisers' parameters, the recipe's trials and the runs of three epochs."""
    top1 = [last_row(f"fast-cifar10/{name}.csv")["top1"] for name in ("cnn_cifar", AA, PA, EA)]
    yield PAGE, "", span(top1, 1) + "%"
    muon, adamw = table("muon-parameters.csv")[["muon_tensors", "adamw_tensors"]].sum()
    yield CIFAR, "CIFAR-10", f"{muon} of the EA network's {muon + adamw} parameters"
    trials = table("recipe-search/trials.csv").set_index("trial")["held_out_top1_by_epoch"]
    last = trials.str.split().str[-1]
    for name in ("t1-base", "t2-tables-classifier"):
        yield CIFAR, "CIFAR-10", " and ".join(last[[name, f"{name}-seed1"]])
    longer = table("ablation/share-longer.csv")["held_out_top1"]
    yield CIFAR, "", " and ".join(shown(longer))


# ---- scenes ----------------------------------------------------------------------------------------------------------


def scenes():
    """Accuracies in docs and on the cards, which are those of the runs; copies among the test photos."""
    for row in table("scenes/results.csv", dtype=str).to_dict("records"):
        first_word, _, _ = row["model"].partition("_")
        kind = "plain" if first_word == "resnet34" else first_word.upper()
        yield PAGE, "Scenes", f"{kind} {row['top1']}"
        last = last_row(f"scenes/{row['model']}.csv")
        assert last["epoch"] == 10
        assert f"{last['top1']:.2f}" == row["validation_top1"]
        if f"`{row['model']}`" in section("README.md"):
            yield "README.md", "", f"| six scenes, 10 | {row['top1']} |"
    copies = table("scenes/copies.csv")
    other = (copies["test"].str.partition("/")[0] != copies["train"].str.partition("/")[0]).sum()
    count = f"{len(copies)} of the 2,534"
    without = table("scenes/copies-top1.csv").set_index("model")
    yield PAGE, "Scenes", count, f"{other} of them", *without["new_top1"]
    for name, row in without.iterrows():
        yield f"weights/{name}.md", "", f"{row.top1:.2f}% top-1", count, f"{row.new_top1:.2f}%"


def quarter_width_networks_and_tuning_on_scenes():
    top1 = top1_of("scenes/quarter-width-runs.csv")
    plain = paired(top1["EA"] - top1["plain"])
    aa = paired(top1["EA"] - top1["AA"])
    taught = paired(top1["taught"] - top1["plain"])
    assert holm([plain["p"], aa["p"]]).tolist() == [1.0, 1.0]
    taught_gain = open_points(taught).replace("(", "points (")
    yield SCENES, "", points(plain).replace("(", "points ("), f"EA - AA {points(aa)}"
    yield SCENES, "", f"{taught_gain}, p = {taught['p']:.3f}"
    seconds = table("scenes/quarter-width-runs.csv").groupby("variant")["seconds"]
    yield SCENES, "", f"{span(seconds.get_group('plain'), 0)} seconds of training"
    ratio = seconds.mean()["taught"] / seconds.mean()["plain"]
    yield PAGE, "", f"takes {ratio:.1f} times as long"
    for name in ("AA", "EA"):
        yield SCENES, "", f"{span(seconds.get_group(name), 0)} for {name}"
    yield PAGE, "", points(plain), points(taught)
    tuning = top1_of("scenes/fine-tuning-runs.csv")
    tuned = tuning["fine-tuned"]
    scratch = tuning["from scratch"]
    gain = open_points(paired(tuned - scratch)).replace(" ", " points ", 1)
    each = ", ".join(shown(tuned))
    yield SCENES, "", f"{each} (mean {tuned.mean():.2f})", scratch[0], gain
    yield "docs/fine-tune.md", "", tuned.mean(), scratch[0]


def captions_of_pictures():
    """A scene's houses and road, and the cat's eyes in the maps of a pretrained transformer."""
    maps = np.load(RESULTS / "scenes" / "scene.npz")["attn"].reshape(8, 2, 14, 14)
    houses = 100 * maps[7, :, 2:6].sum((1, 2))
    road = 100 * maps[5, :, 7:].sum((1, 2))
    yield PAGE, "Scenes", f"{span(houses, 0)}% of its attention on the lit houses"
    yield PAGE, "Scenes", f"{span(road, 0)}% on the road"
    with np.load(RESULTS / "pretrained-maps.npz") as file:
        kept = {name: file[name].astype(float) for name in file.files}
    left_eye = kept["cls"][..., 9:16, 6:14].mean((-2, -1))
    right_eye = kept["cls"][..., 11:18, 24:30].mean((-2, -1))
    eyes = (left_eye + right_eye) / 2
    yield TUNING, "", f"{eyes[5]:.1f} times", span(np.delete(eyes, 5), 1) + " times"
    to_plain = _moved(kept["before"], kept["plain"])
    to_gates = _moved(kept["before"], kept["gates"])
    yield TUNING, "", span([*to_plain, *to_gates], 0) + "%"
    yield TUNING, "", span(_moved(kept["plain"], kept["gates"]), 0) + "%"


def _moved(maps, others):
    """Return by map which percentage of attention lies elsewhere in the other."""
    shares = maps / maps.sum((1, 2), keepdims=True)
    other_shares = others / others.sum((1, 2), keepdims=True)
    return 50 * np.abs(shares - other_shares).sum((1, 2))


def fine_tuning_of_a_pretrained_transformer_on_scenes():
    top1 = top1_of("finetune-scenes-runs.csv")
    heading = "Tuning a vision transformer"
    for way, name in (("plain", "The plain ViT has"), ("gates", "EA (gates from 0)")):
        yield PAGE, heading, f"{name} {spread(top1[way])}"
    yield PAGE, "", points(paired(top1["gates"] - top1["plain"]))
    last_layer = table("finetune-scenes-maps.csv").query("layer == 12").groupby("model")
    for model in ("before", "plain", "gates"):
        means = last_layer.get_group(model)[["entropy_share", "distance_pixels"]].mean()
        yield TUNING, "", means["entropy_share"], f"{means['distance_pixels']:.0f}"
    ranges = table("finetune-scenes-runs.csv")[["alpha", "beta"]].stack().dropna()
    largest = ranges.str.split(" to ").explode().astype(float).abs().max()
    yield PAGE, heading, f"within {largest:.2f} of 0"
    means = f"{top1['plain'].mean():.2f}% plain and {top1['gates'].mean():.2f}%"
    yield "docs/fine-tune.md", "What to expect", means


def attention_added_to_a_trained_resnet():
    times = table("added-attention-times.csv").set_index("model")["train_ms"]
    steps = shown([times["aa"] / times["plain"], times["ea"] / times["plain"]])
    yield ADDED, "", *steps
    top1 = top1_of("added-attention-runs.csv")
    gains = {}
    for way, other in (("aa", "plain"), ("ea", "plain"), ("ea", "aa")):
        gains[way, other] = paired(top1[way] - top1[other])
        yield PAGE, "", points(gains[way, other], "+")
    behind = [paired(top1["plain-18"] - top1[way]) for way in ("aa", "ea")]
    assert min(loss["low"] for loss in behind) > 0
    yield PAGE, "", f"leads by {points(behind[0])} and {points(behind[1])}"
    rows = break_even.table().set_index("comparison")
    pays = rows.loc[["aa - plain", "ea - plain"]]
    for row in pays.itertuples():
        yield "docs/fine-tune.md", "", f"{row.break_even:.2f} ({row.low:.2f} to {row.high:.2f})"
    yield "docs/fine-tune.md", "", f"took {' and '.join(steps)}"
    last = table("added-attention-widths.csv").query("place.str.startswith('stage 4')")["ratio"]
    costs = f"costs {100 * (last.min() - 1):.0f} to {100 * (last.max() - 1):.0f}% of a step"
    yield "docs/fine-tune.md", "", costs
    compiled = table("h200/resnets.csv").query("mode == 'default'")
    fastest = compiled.groupby("network")["train_ms"].min()
    ratios = fastest / fastest["resnet50"]
    steps = f"AA-50 takes {ratios['aa_resnet50']:.2f} and EA-50 {ratios['ea_aa_resnet50']:.2f}"
    yield "docs/fine-tune.md", "", steps


def test_the_tables_of_the_pages_come_from_the_rows(tmp_path, monkeypatch):
    """As `make lint` checks: a figure that was changed by hand is found, and a table that nothing writes is refused."""
    assert pages.main(["--check"]) == 0
    page = ADDED
    text = (ROOT / page).read_text(encoding="utf-8")
    assert pages.written(page, text) == text
    changed = text.replace("83.39", "83.93", 1)
    assert changed != text
    assert pages.written(page, changed) == text
    with refused("must mark the tables"):
        pages.written(page, text.replace("<!-- table: by seed -->", "<!-- table: by seeds -->"))


def test_kept_tables_follow_from_the_rows():
    computed = collapse.effects_of(table("collapse.csv"))
    pd.testing.assert_frame_equal(computed, table("collapse-effects.csv"))


def test_the_controls_effects_are_computed_when_all_their_runs_are_done():
    """controls.md: nothing is computed before; then each mean is that of the differences by seed."""
    runs = table("collapse.csv")
    rows = [
        {
            "data": "cifar100",
            "network": network,
            "seed": seed,
            "top1": 50 + place + 0.1 * seed**place,
        }
        for place, network in enumerate(CONTROLS)
        for seed in SEEDS
    ]
    assert collapse.effects_of_controls(runs, pd.DataFrame(rows[:-1])) is None
    effects = collapse.effects_of_controls(runs, pd.DataFrame(rows)).set_index("name")
    top1 = runs.query("data == 'cifar100' and network == 'none + norm'").set_index("seed")["top1"]
    for place, network in enumerate(CONTROLS):
        leads = {seed: top1[seed] - (50 + place + 0.1 * seed**place) for seed in SEEDS}
        effect = effects.loc[f"none + norm - {network}"]
        assert effect["difference"] == pytest.approx(sum(leads.values()) / 10)
        assert effect["seeds 10 to 14"] == pytest.approx(sum(leads[s] for s in range(10, 15)) / 5)
        assert effect["p"] <= effect["p_holm"]
    assert effects["p"].isna().sum() == 2  # described, not tested


def test_a_table_without_complete_seeds_is_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(collapse, "RESULTS", tmp_path / "collapse.csv")
    table("collapse.csv").query("network != 'none'").to_csv(collapse.RESULTS)
    with refused("two seeds of all four networks are required"):
        collapse.main()
    assert list(tmp_path.iterdir()) == [collapse.RESULTS]


def of_the_collapse(data):
    """Return top-1 by seed and network of the complete seeds of a data set, and the effects by name."""
    runs = table("collapse.csv").query("data == @data")
    top1 = runs.pivot(index="seed", columns="network", values="top1").dropna()
    effects = table("collapse-effects.csv").query("data == @data")
    return top1, effects.set_index("name")


def run_b():
    """Ten seeds of attention with the norm and of the convolution: differences, controls, what they cost."""
    for data in SETS:
        top1, effects = of_the_collapse(data)
        assert top1.index.tolist() == [*range(5, 15)]
        for name in effects.index:
            yield PAGE, "", points(effects.loc[name], "+")
        former = top1_of(f"evidence/{data}-runs.csv")
        deficit = former["cnn"].mean() - former["none"].mean()
        cnn_effect = effects.loc["cnn - none"]
        assert cnn_effect["low"] < 0 < cnn_effect["high"] < deficit
    assert effects["p_holm"].dropna().lt(0.05).tolist() == [True, True, False]
    lead = paired(top1["none + norm"] - top1["cnn"])
    rows = break_even.table().set_index("comparison").loc["none + norm - cnn"]
    assert (table("collapse-times.csv")["cnn"] < table("collapse-times.csv")["none + norm"]).all()
    yield "README.md", "Results", points(lead), f"{rows['time_ratio']:.2f} times as long"
    longer = f"{rows['time_ratio']:.2f} times as long, break-even is {rows['break_even']:.2f}"
    yield PAGE, "", longer
    yield PAGE, VERSUS, rows["longer_gains"], f"{rows['break_even'] - 1:.0%} more updates"
    yield PAGE, VERSUS, f"leads by {-rows['at_equal_time']:.2f} at equal time"
    five = top1_of("../factorial/cifar100-runs.csv")
    more_updates = paired(five["none equal time"] - five["none"])
    yield PAGE, VERSUS, f"updates, {points(more_updates, '+')}"
    beyond = paired((top1["none + norm"] - five["none equal time"]).dropna())
    yield PAGE, "", points(beyond, "+")
    uniform = table("across/verdict.csv").query("name == 'uniform' and part == 'cifar100'")
    yield PAGE, VERSUS, f"(`uniform`), {points(uniform.iloc[0], '+')}"
    after_five = (top1["none + norm"] - top1["none"]).loc[5:9].mean()
    yield PAGE, VERSUS, f"README gave {after_five:+.2f}"


def some_runs_of_the_collapse_are_old():
    top1, _ = of_the_collapse("cifar10")
    former = top1_of("../factorial/cifar10-runs.csv")["none"]
    repeats = table("../healthy_maps/norm-repeats.csv").query("network == 'none'")
    assert top1["none"].loc[6:9].tolist() == former.loc[6:9].tolist()
    assert top1["none"].loc[5:6].tolist() == repeats["top1"].tolist()
    yield COLLAPSED, "CIFAR-10", "norm-repeats.csv"


def the_maps_of_these_narrow_networks():
    """Without the norm, too, no layer is as sharp as a collapsed one."""
    runs = table("collapse.csv").query("data == 'cifar100' and seed >= 10 and network != 'cnn'")
    runs = runs.set_index("network").filter(like="entropy_")
    assert len(runs.dropna()) == 15
    collapsed = pd.read_csv(HEALTHY_RUNS / "collapsed-entropy.csv")["entropy_share"]
    means = runs.groupby("network").mean()
    assert means.to_numpy().min() > collapsed.max()
    correction = "Correction of 2026-11-28"
    yield COLLAPSED, correction, f"entropies of {span(collapsed)} of log N"
    yield COLLAPSED, correction, f"none has {span(means.loc['none'])} by layer"
    yield COLLAPSED, correction, f"none + norm {span(means.loc['none + norm'])}"
    yield COLLAPSED, correction, f"EA + norm {span(means.loc['EA + norm'])}"


# ---- healthy maps ----------------------------------------------------------------------------------------------------


def test_the_effects_of_the_norm_follow_from_the_runs():
    runs = pd.read_csv(HEALTHY_RUNS / "norm-runs.csv")
    effects = pd.read_csv(HEALTHY_RUNS / "norm-effects.csv")
    pd.testing.assert_frame_equal(effects_of(runs), effects)
    assert effects["low"].min() > -0.5, "the norm costs little, by the page's rule"


def the_recipes_of_runs_with_the_norm():
    views = pd.read_csv(HEALTHY_RUNS / "former-accuracy.csv", dtype=str).set_index("run")[
        "six_views"
    ]
    for run, before in ((EA, "six views "), (AA, "")):
        last = pd.read_csv(HEALTHY_RUNS / f"{run}.csv").iloc[-1]
        yield "ea_vision/recipes/fast.yaml", "", f"{last['top1']:.2f}, {before}{views[run]} ({run})"


def the_shipped_networks():
    """Those of the long runs and PA's met the rule of entropies; docs have their accuracies."""
    entropies = table("shipped-entropy.csv")
    for name, run, tag, said in (
        (EA, "ea_long", "long_c10", "EA {:.2f} and {}"),
        (AA, "none_long", "long_c10", "AA has {:.2f}%, six views {}"),
        (PA, PA, "fast_norm_c10", ""),
    ):
        last = pd.read_csv(HEALTHY_RUNS / f"{run}.csv").iloc[-1]
        card = section(f"weights/{name}.{tag}.md")
        _, views = re.findall(r"(\d\d\.\d\d)%(?: top-1,|\. 10000)", card)
        yield PAGE, "CIFAR-10", said.format(last["top1"], views)
        shares = entropies[entropies["model"] == f"{name}.{tag}"]["entropy_share"]
        assert shares.min() >= 0.19, "the rule"


def rows_of_readme():
    """Trained networks beside what the papers have, the sizes of all, and the first sentences of the results."""
    long = {EA: "ea_long", AA: "none_long"}
    top1 = {}
    for name, run in long.items():
        last = pd.read_csv(HEALTHY_RUNS / f"{run}.csv").iloc[-1]
        top1[name] = last["top1"]
        yield "README.md", "", f"CIFAR-10, {last['epoch']:.0f} | {last['top1']:.2f} |"
    last = pd.read_csv(HEALTHY_RUNS / f"{PA}.csv").iloc[-1]
    epochs = last_row(f"fast-cifar10/{PA}.csv")["epoch"] + last["epoch"]
    yield "README.md", "", f"CIFAR-10, {epochs:.0f} | {last['top1']:.2f} |"
    epochs = load_recipe("pa_cifar10")["epochs"]
    for name in (AA, PA):
        yield "README.md", "", f"{published.figures(name)['top1']['CIFAR-10']:.2f} ({epochs})"
    yield (
        "README.md",
        "",
        f"{published.figures('ea_aa_resnet50')['top1']['ImageNet']:.2f}, ImageNet",
    )
    behind = published.figures(AA)["top1"]["CIFAR-10"] - top1[AA]
    yield "README.md", "Results", f"{behind:.2f} points below its paper"
    yield PAGE, "CIFAR-10", f"the paper's AA {published.figures(AA)['top1']['CIFAR-100']:.2f}"


def test_the_sizes_of_readmes_networks(capsys):
    rows = rows_of("README.md", r"\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| .*")
    assert len(rows) == 6
    assert main(["models", "--sizes", *[name for name, *_ in rows]]) == 0
    printed = capsys.readouterr().out
    counted = re.findall(r"^\| (\w+) +\| \S+ +\| ([\d.]+) +\| ([\d.]+)", printed, re.M)
    assert sorted(counted) == sorted(rows)


def the_long_runs():
    recipe = "ea_vision/recipes/cifar_long.yaml"
    for name, run in ((EA, "ea_long"), (AA, "none_long")):
        last = pd.read_csv(HEALTHY_RUNS / f"{run}.csv").iloc[-1]
        yield recipe, "", f"{last['top1']:.2f} ({name})"
    hundred = pd.read_csv(HEALTHY_RUNS / "ea_long_cifar100.csv").iloc[-1]
    top1 = f"{hundred['top1']:.2f}"
    epochs = f"{hundred['epoch']:.0f}"
    yield recipe, "", f"--epochs {epochs}: {top1}"
    yield PAGE, "CIFAR-10", f"{top1} after {epochs} epochs"


def seconds_of_runs():
    long = pd.read_csv(HEALTHY_RUNS / "ea_long.csv")["seconds"].sum()
    yield PAGE, "CIFAR-10", f"{long / 60:.0f} minutes on an H200"
    tuned = table("finetune-scenes-runs.csv")["seconds"]
    yield TUNING, "", f"{span(tuned / 60, 0)} minutes", f"{tuned.sum() / 3600:.1f} hours"
    plain = table("across/third-long.csv").query("variant == 'plain 69 epochs'")["seconds"]
    yield "experiments/across/README.md", "", f"{plain.sum() / 3600:.1f} hours by the seconds"


# ---- the probe, faithfulness, detection, speed -----------------------------------------------------------------------


def detectors():
    for name in ("plain", "aa", "ea_aa"):
        ap = [last_row(f"detection/{name}-seed{seed}.csv")["AP"] for seed in (0, 1)]
        yield "docs/detection.md", "Training", f"{np.mean(ap):.1f}"
    minutes = table("detection/tiny-ea.csv")["seconds"].sum() / 60
    yield "experiments/detection.md", "Tiny-ImageNet's boxes", f"{minutes:.0f} minutes on one core"


def smaller_experiments():
    page = "experiments/others.md"
    attention = table("tiny-imagenet/attention.csv").query("images == 160")
    tiny = attention.groupby("run")["top1"].mean() + 1e-9
    yield page, "", f"{tiny['resnet34']:.1f}%"
    for name in ("aa", "pa_aa", "ea_aa"):
        yield page, "", f"{name[:2].upper()} {tiny[f'{name}_resnet34']:.1f}"
    for top1 in table("moved-digits.csv").groupby("transform")["top1"].mean():
        yield page, "", f"{top1:.2f}%"
    kept = table("widths/misses.csv")
    best = kept.groupby("kind")["largest_miss_percent"].min()
    yield CIFAR, "", f"{best['doubled']:.0f}%", f"{best['rising']:.1f}%", f"{best['any']:.1f}%"
    yield CIFAR, "", f"{kept['cnn_params_m'][1]:.1f}M parameters"


def speed():
    for loader in table("loaders.csv").itertuples():
        rates = (str(loader.mib), f"{loader.images_per_s:,}", f"{loader.waits_percent}%")
        yield "docs/imagenet.md", "Faster reading", cells(loader.loader, *rates)
    for row in table("recording-cost.csv").itertuples():
        seconds = (row.plain_s + 1e-6, row.recorded_s + 1e-6)
        figures = cells(f"`{row.network}`", *seconds, f"{row.maps_mib:.1f}")
        yield "docs/record.md", "Cost", figures


BY_SIZE = "Networks by image size"


def test_the_table_of_large_images():
    """The networks at 640 pixels."""
    expected = []
    for *_, infer, train, mib in table("large-maps.csv").itertuples(index=False):
        expected.append((*shown([infer + 1e-6, train + 1e-6]), f"{mib:,.0f}"))
    row = r"\| .* \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|"
    assert rows_of("docs/kernels.md", row, "Large images") == expected


def networks_by_image_size():
    sizes = table("large-maps-sizes.csv").set_index(["malloc", "code"])
    ea = sizes[sizes["network"] == "ea"]["training, ratio"]
    yield KERNELS, BY_SIZE, ea["as it is", "before"].item()
    asked_again = ea["as it is", "after, in place"].item()
    kept = ea["kept by environment", "after, in place"].item()
    yield KERNELS, BY_SIZE, kept
    again = f"at {asked_again:.2f} of ResNet-50's rate instead of {kept:.2f}"
    yield "docs/kernels.md", "Large images", again
    windows = table("large-maps-windows.csv").set_index("network")["training, s"]
    assert windows["aa, window=7"] >= windows["aa"]
    limit = sizes.loc[("kept", "limit")].set_index("network")
    bare = limit.loc["aa without attention"]
    for network in (bare, limit.loc["aa"]):
        rates = network[["inference, ratio", "training, ratio"]]
        yield KERNELS, BY_SIZE, " and ".join(shown(rates))
    seconds = limit["inference, s"]
    goal = 2000 * (seconds["resnet50"] / 0.89 - bare["inference, s"])  # ms of two images
    yield KERNELS, BY_SIZE, f"leaves attention {goal:.0f} ms"
    taken = 2000 * (seconds["aa"] - bare["inference, s"])
    yield KERNELS, BY_SIZE, f"the kernel takes {taken:.0f}"


def sentences():
    rows = table("sst.csv").pivot(index="seed", columns="network", values="test")
    readme = "experiments/text/README.md"
    assert rows.index.tolist() == [*range(10)]
    for name in ("PA", "EA"):
        effect = paired(rows[name] - rows["none"], 0.01)
        assert effect["high"] < 48.60 - 47.64  # the paper's PA and Transformer
        first_six = paired((rows[name] - rows["none"])[:6], 0.01)
        looked_at = open_points(first_six).replace(" (", ", ")
        yield readme, "The results", f"{name} - none {looked_at}"
        yield PAGE, "", f"{name} - none {points(effect)}"
    yield "docs/transformers.md", "", rows["none"].mean(), rows["PA"].mean()


def resnets_on_a_gpu():
    rows = table("h200/resnets.csv").set_index(["network", "implementation", "mode"])
    for network, compiled in (("aa", "sdpa"), ("pa_aa", "chosen"), ("ea_aa", "chosen")):
        name = f"{network}_resnet50"
        eager = rows.loc[name, "chosen", "eager"]
        best = rows.loc[name, compiled, "default"]
        ratios = (eager.train_rate_ratio, best.train_rate_ratio, best.memory_ratio)
        yield "docs/kernels.md", "Speed on a GPU", cells(name, *ratios)
        if network != "pa_aa":
            yield KERNELS, "Training steps of ResNets", best.train_rate_ratio
    plain = rows.train_ms["resnet50", "chosen"]
    faster = plain["eager"] / plain["default"]
    yield "docs/kernels.md", "Speed on a GPU", f"resnet50 {faster:.2f} times"
    images = 256
    rate = images / (rows.train_ms["ea_aa_resnet50", "chosen", "default"] / 1000)
    memory = rows.peak_gib[:, "chosen", "eager"] * 1024 / images
    costs = "What a training costs"
    yield "docs/imagenet.md", costs, f"{rate:,.0f} images per second"
    per_image = f"{memory['ea_aa_resnet50']:.0f} MiB per image ({memory['resnet50']:.0f} for"
    yield "docs/imagenet.md", costs, per_image


def kernels_on_a_gpu():
    profiles = table("h200/profiles.csv").set_index(["step", "kind"])["ms"]
    compiled = profiles["ea_aa_resnet50, batch 256, compiled"]
    attention = compiled[compiled.index.str.startswith("attention: ")]
    others = compiled[["norms, sums, pooling, fused", "convolutions", "products"]]
    heading = "Training steps of ResNets"
    yield KERNELS, heading, f"computes for {compiled.sum():.2f}", attention.sum(), *others
    in_graphs = profiles["CIFAR, batch 512, CUDA graphs"].sum()
    yield KERNELS, "The host of a CIFAR step", f"computes for {in_graphs:.2f}"


def cifar_steps_on_a_gpu():
    steps = table("h200/cifar-steps.csv").query("batch == 512 and optimizer == 'batched muon'")
    ms = steps.set_index("mode")["ms"]
    heading = "The host of a CIFAR step"
    yield "docs/kernels.md", "Speed on a GPU", ms["reduce-overhead"], ms["eager"]
    epochs = table("h200/cifar-epochs.csv")
    first = epochs["seconds"][0]
    later = epochs["seconds"][1:].median()
    whole = (first + 59 * later) / 60
    yield KERNELS, heading, f"took {first:.0f} seconds", f"{later:.2f} seconds"
    yield KERNELS, heading, f"{epochs['top1'].iloc[-1]:.2f}%", f"{whole:.1f} minutes"
    yield "docs/faq.md", "", f"by estimate {whole:.0f} minutes on an H200"
    yield "docs/kernels.md", "Speed on a GPU", f"first epoch takes {first:.0f} seconds"
    recipe = "ea_vision/recipes/cifar_long.yaml"
    yield recipe, "", f"{later:.1f} seconds per epoch", f"{first:.0f} for the first"


def parts_of_a_layer():
    parts = table("large-maps-parts.csv").query("pixels == 784").groupby("part")["ms"].sum()
    share = parts[["convolution", "previous maps"]].sum() / parts.sum()
    yield KERNELS, "Parts of a layer on a CPU", f"take {share:.0%} of the time"


def the_compilers_figures():
    kernels = table("kernel-figures.csv")
    yield KERNELS, "The compiler's figures", f"all {len(kernels):,} kernels"
    shown_kernels = kernels.query("layer == 'ea50' and GPU == 9.0 and dtype == 'bf16'")
    assert (shown_kernels["spilled"] == 0).all()


CLAIMS = [function for function in [*globals().values()] if isgeneratorfunction(function)]


@pytest.mark.parametrize("claims", CLAIMS)
def test_the_pages_say_what_the_files_say(claims):
    for page, heading, *figures in claims():
        page_says(page, heading, *figures)


def test_the_faithfulness_of_class_evidence_is_that_of_its_rows():
    page = (ROOT / "docs" / "look.md").read_text(encoding="utf-8")
    for row in table("faithfulness/classes.csv").query("ranking != 'layer 6'").itertuples():
        assert f"{row.deletion:.3f}" in page, row.ranking

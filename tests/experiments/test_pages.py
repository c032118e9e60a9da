"""The pages agree with the files: every interval on a page is one of the files', and each other figure below is
computed from its file and must occur in its section, in any wording.

Each generator yields (page, heading, figures ...); tables are written by experiments/pages.py.
"""

import re
from inspect import isgeneratorfunction

import numpy as np
import pandas as pd
import pytest

from ea_vision.__main__ import main
from ea_vision.engine.config import load_recipe
from experiments import break_even, pages, published, sensitivity
from experiments.across import power
from experiments.collapse import analyse as collapse
from experiments.evidence import paired
from experiments.factorial import analyse
from experiments.healthy_maps.analyse import effects_of
from experiments.pages import AA, EA, HEALTHY, PA, SETS
from tests.experiments.pages import (
    RESULTS,
    ROOT,
    last_row,
    page_says,
    plain_text,
    rows_of,
    section,
    shown,
    span,
    table,
    top1_of,
)
from tests.refused import refused

EXPERIMENTS = ROOT / "experiments"
FACTORIAL = EXPERIMENTS / "factorial"
PAGE = "docs/experiments.md"


# ---- every interval --------------------------------------------------------------------------------------------------

INTERVAL = re.compile(r"([+-]?\d+\.\d\d)(?: points)? \((-?\d+\.\d\d) to (-?\d+\.\d\d)[,)]")
CORRECTED = re.compile(r"corrected p (?:= |from )(\d\.\d{3})")
TABLE = re.compile(r"<!-- table: .+? -->\n.*?<!-- end -->", re.DOTALL)


def intervals_in(text):
    """Return the differences of a text with their intervals."""
    return {tuple(map(float, numbers)) for numbers in INTERVAL.findall(plain_text(text))}


def gains_that_no_table_has():
    """Return EA - none of all on CIFAR-10 pooled, of fresh seeds and of all; the differences of networks on scenes."""
    tables = [top1_of(HEALTHY / "norm-runs.csv", "cifar10")]
    for data in SETS:
        tables += published.seeds_of(data).values()
    gains = [top1["EA"] - top1["none"] for top1 in tables]
    norm, first, fresh, *_ = gains
    pooled = pd.concat([norm, first, fresh])
    assert len(pooled) == 15
    for file, *pairs in (
        ("quarter-width-runs", ("EA", "plain"), ("EA", "AA"), ("taught", "plain")),
        ("fine-tuning-runs", ("fine-tuned", "from scratch")),
    ):
        scenes = top1_of(f"scenes/{file}.csv")
        gains += [scenes[better] - scenes[worse] for better, worse in pairs]
    return [pooled, *gains]


def test_every_interval_and_corrected_p_on_a_page_is_one_of_the_files():
    """Of the tables that are generated, of the files of effects, or computed above; a loss may be said as a gain."""
    computed = set()
    corrected = set()
    effects = [pd.DataFrame([paired(gains) for gains in gains_that_no_table_has()])]
    for file in EXPERIMENTS.rglob("*.csv"):
        rows = pd.read_csv(file)
        if {"difference", "low", "high"} <= set(rows):
            effects.append(rows)
    for row in pd.concat(effects)[["difference", "low", "high", "p_holm"]].itertuples(index=False):
        *interval, p = row
        computed.add(tuple(float(f"{number:.2f}") for number in interval))
        corrected.add(f"{p:.3f}")
    texts = {}
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *EXPERIMENTS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for written in TABLE.findall(text) + [text] * (page.name == "published.md"):
            computed |= intervals_in(written)
        texts[page] = TABLE.sub("", text)
    computed |= {(-gain, -high, -low) for gain, low, high in computed}
    count = 0
    for page, text in texts.items():
        count += len(intervals_in(text))
        assert intervals_in(text) <= computed, page
        assert set(CORRECTED.findall(plain_text(text))) <= corrected, page
    assert count > 70


def published_top1(model, data):
    return published.figures(model)["top1"][data]


def gains_of_the_papers():
    """Which all runs on CIFAR-10 together rule out for narrow networks."""
    pooled = paired(gains_that_no_table_has()[0])
    gain = published_top1(PA, "CIFAR-10") - published_top1(AA, "CIFAR-10")
    resnets = [published_top1(name, "ImageNet") for name in ("ea_aa_resnet34", "aa_resnet34")]
    ea_gain = resnets[0] - resnets[1]
    assert pooled["high"] < min(gain, ea_gain)
    yield PAGE, "", f"gains: {gain:+.2f} of PA, {ea_gain:+.2f} of EA"


def test_the_factorial(tmp_path):
    """The files follow from the kept runs; runs of other seeds and of other data are refused."""
    files = [str(FACTORIAL / f"{data}-runs.csv") for data in SETS]
    assert analyse.main([*files, "-o", str(tmp_path)]) == 0
    kept = (FACTORIAL / "cifar10-runs.csv").read_text()
    assert (tmp_path / "cifar10-runs.csv").read_text() == kept
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "effects.csv"), pd.read_csv(FACTORIAL / "effects.csv"), rtol=1e-9
    )
    (tmp_path / "few.csv").write_text("".join(kept.splitlines(True)[:2]))
    with refused("seeds 5 to 9, no others|no runs of", ValueError):
        analyse.read_fresh(tmp_path / "few.csv")
    (tmp_path / "fresh-cifar100.csv").write_text(kept)
    with refused("must begin with cifar10 or cifar100, got .*fresh"):
        analyse.main([str(tmp_path / "fresh-cifar100.csv"), "-o", str(tmp_path)])


def what_each_study_could_have_found():
    heading = "What each study could have found"
    gains = sensitivity.table()["found_at_80_percent"]
    finds = shown(gains)
    yield PAGE, heading, f"{span(gains[:6])} points"
    yield PAGE, heading, f"{finds[10]} and {finds[11]} in SST"
    norm = f"norm on CIFAR-100 they find {finds[13]} (against the convolution {finds[15]})"
    yield PAGE, heading, norm
    verdict = table("across/verdict.csv").query("part in ('vit-rival', 'second-updates')")
    yield PAGE, heading, f"small ViT {span(verdict['found_at_80_percent'])}"


# ---- maps, and runs on CIFAR -----------------------------------------------------------------------------------------


def replaced_maps():
    """What docs say of networks without maps."""
    for name, short in ((AA, "AA"), (EA, "EA")):
        figures = table("replaced-maps/long-replaced.csv").set_index("maps")
        top1 = figures[figures["model"] == f"{name}.long_c10"]["top1"]
        yield PAGE, "What the networks owe to their maps", *top1[["trained", "other", "none"]]
        yield PAGE, "", f"{top1['trained'] - top1['none']:.2f} ({short})"


def last_of(run):
    """Return the last epoch's row of a run with the norm."""
    return last_row(HEALTHY / f"{run}.csv")


def runs_of_the_recipes():
    """The recipe's own words have the figures of its runs."""
    recipes = "ea_vision/recipes/{}.yaml".format
    for recipe in ("fast_sgd", "fast"):
        for path in (RESULTS / f"{recipe.replace('_', '-')}-cifar10").glob("*.csv"):
            run = last_row(path)
            assert run["epoch"] == 10
            yield recipes(recipe), "", run["top1"]
    for name, run in ((EA, "ea_long"), (AA, "none_long")):
        yield recipes("fast"), "", last_of(name)["top1"]
        yield recipes("cifar_long"), "", f"{last_of(run)['top1']:.2f} ({name})"
    hundred = last_of("ea_long_cifar100")
    top1 = f"{hundred['top1']:.2f}"
    epochs = f"{hundred['epoch']:.0f}"
    yield recipes("cifar_long"), "", f"--epochs {epochs}: {top1}"
    yield PAGE, "CIFAR-10", f"{top1} after {epochs} epochs"


def cifar10():
    top1 = [last_row(f"fast-cifar10/{name}.csv")["top1"] for name in ("cnn_cifar", AA, PA, EA)]
    yield PAGE, "", span(top1, 1) + "%"
    long = table(HEALTHY / "ea_long.csv")["seconds"].sum()
    yield PAGE, "CIFAR-10", f"{long / 60:.0f} minutes on an H200"


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
    kinds = [copies[part].str.partition("/")[0] for part in ("test", "train")]
    other = kinds[0].ne(kinds[1]).sum()
    count = f"{len(copies)} of the 2,534"
    without = table("scenes/copies-top1.csv").set_index("model")
    yield PAGE, "Scenes", count, f"{other} of them", *without["new_top1"]
    for name, row in without.iterrows():
        yield f"weights/{name}.md", "", f"{row.top1:.2f}% top-1", count, f"{row.new_top1:.2f}%"


def captions():
    """A scene's houses and road, the objects that a small DETR finds, and how faithful a class's evidence is."""
    maps = np.load(RESULTS / "scenes" / "scene.npz")["attn"].reshape(8, 2, 14, 14)
    houses = 100 * maps[7, :, 2:6].sum((1, 2))
    road = 100 * maps[5, :, 7:].sum((1, 2))
    yield PAGE, "Scenes", f"{span(houses, 0)}% of its attention on the lit houses"
    yield PAGE, "Scenes", f"{span(road, 0)}% on the road"
    share = table("detr-picture.csv")["found"][0]
    yield "docs/look.md", "", f"finds {share:.0%} of the objects"
    evidence = table("faithfulness/classes.csv").query("ranking != 'layer 6'")
    yield "docs/look.md", "", *evidence["deletion"].map("{:.3f}".format)


def fine_tuning():
    """Of our networks and of a pretrained transformer, and attention added to a trained ResNet."""
    tuning = top1_of("scenes/fine-tuning-runs.csv")
    yield "docs/fine-tune.md", "", tuning["fine-tuned"].mean(), tuning["from scratch"][0]
    top1 = top1_of("finetune-scenes-runs.csv")
    heading = "Tuning a vision transformer"
    for way, name in (("plain", "The plain ViT has"), ("gates", "EA (gates from 0)")):
        yield PAGE, heading, f"{name} {pages.spread(top1[way])}"
    ranges = table("finetune-scenes-runs.csv")[["alpha", "beta"]].stack().dropna()
    ends = ranges.str.split(" to ").explode()
    largest = ends.astype(float).abs().max()
    yield PAGE, heading, f"within {largest:.2f} of 0"
    means = f"{top1['plain'].mean():.2f}% plain and {top1['gates'].mean():.2f}%"
    yield "docs/fine-tune.md", "What to expect", means
    times = table("added-attention-times.csv").set_index("model")["train_ms"]
    steps = shown([times["aa"] / times["plain"], times["ea"] / times["plain"]])
    yield "docs/fine-tune.md", "", f"took {' and '.join(steps)}"
    last = table("added-attention-widths.csv").query("place.str.startswith('stage 4')")["ratio"]
    costs = f"costs {100 * (last.min() - 1):.0f} to {100 * (last.max() - 1):.0f}% of a step"
    yield "docs/fine-tune.md", "", costs
    compiled = table("h200/resnets.csv").query("mode == 'default'")
    fastest = compiled.groupby("network")["train_ms"].min()
    ratios = fastest / fastest["resnet50"]
    steps = f"AA-50 takes {ratios['aa_resnet50']:.2f} and EA-50 {ratios['ea_aa_resnet50']:.2f}"
    yield "docs/fine-tune.md", "", steps


# ---- tables and effects ----------------------------------------------------------------------------------------------


def test_the_tables_of_the_pages_come_from_the_rows():
    """`make lint` checks every page: a figure changed by hand is found, and a table that nothing writes is refused."""
    page = "experiments/added_attention/README.md"
    text = section(page)
    changed = text.replace("83.39", "83.93", 1)
    assert changed != text
    assert pages.written(page, changed) == text
    with refused("must mark the tables"):
        pages.written(page, text.replace("<!-- table: by seed -->", "<!-- table: by seeds -->"))


def test_kept_effects_follow_from_the_rows():
    runs = table("collapse.csv")
    controls = table("collapse-controls.csv")
    norm = table(HEALTHY / "norm-effects.csv")
    for computed, kept in (
        (collapse.effects_of(runs), table("collapse-effects.csv")),
        (collapse.effects_of_controls(runs, controls), table("collapse-controls-effects.csv")),
        (effects_of(table(HEALTHY / "norm-runs.csv")), norm),
        (power.achieved(), table("across/power.csv")),
    ):
        pd.testing.assert_frame_equal(computed, kept)
    assert norm["low"].min() > -0.5, "the norm costs little, by the page's rule"
    assert collapse.effects_of_controls(runs, controls[:-1]) is None, "before all runs are done"


def test_a_table_without_complete_seeds_is_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(collapse, "RESULTS", tmp_path / "collapse.csv")
    table("collapse.csv").query("network != 'none'").to_csv(collapse.RESULTS)
    with refused("two seeds of all four networks are required"):
        collapse.main()
    assert list(tmp_path.iterdir()) == [collapse.RESULTS]


def run_b():
    """Attention with the norm against the convolution: what it costs, and what longer training brings."""
    effects = table("collapse-effects.csv").set_index(["data", "name"])
    for data in SETS:
        former = top1_of(f"evidence/{data}-runs.csv").mean()
        cnn = effects.loc[data, "cnn - none"]
        assert cnn["low"] < 0 < cnn["high"] < former["cnn"] - former["none"]
    rows = break_even.table().set_index("comparison").loc["none + norm - cnn"]
    longer = f"{rows['time_ratio']:.2f} times as long, break-even is {rows['break_even']:.2f}"
    yield PAGE, "", longer
    yield PAGE, "Attention against convolution", f"{rows['time_ratio']:.2f} times as long"


def cheap_attention():
    """The leads by learning rate, and what is left of the lead with maps that look at nothing."""
    page = "experiments/cheap_attention/README.md"
    top1 = table("cheap-attention-rates.csv").groupby("way")["validation_top1"].mean()
    leads = []
    for rate in (3, 10, 30):
        leads.append(top1[f"instead rate {rate}"] - top1[f"plain as long as instead 6 rate {rate}"])
    assert max(leads[1:]) < 0
    lengths = table("cheap-attention-lengths.csv").set_index("epochs")["validation_top1"]
    assert lengths[30] - lengths[24] < 0.5
    said = f"{lengths[24]:.2f}% after 24 epochs and {lengths[30]:.2f}% after 30"
    yield page, "Learning rates", said
    yield page, "Learning rates", f"the lead is {leads[0]:.1f} points"
    tested = table("cheap-attention-runs.csv").groupby("variant")["test_top1"].mean()
    looks_at_nothing = tested["instead uniform"] - tested["plain as long as instead 6"]
    yield page, "The answer", f"{looks_at_nothing:.2f} of it"


# ---- README ----------------------------------------------------------------------------------------------------------


def the_shipped_networks():
    """They met the rule of entropies; docs have the accuracies of the long runs."""
    shares = table("shipped-entropy.csv").groupby("model")["entropy_share"].min()
    shipped = list(pages.SHIPPED.values())
    assert (shares[shipped] >= 0.19).all()
    for name, run, said in (
        (EA, "ea_long", "EA {:.2f} and {}"),
        (AA, "none_long", "AA has {:.2f}%, six views {}"),
    ):
        card = section(f"weights/{name}.long_c10.md")
        _, views = re.findall(r"(\d\d\.\d\d)%(?: top-1,|\. 10000)", card)
        yield PAGE, "CIFAR-10", said.format(last_of(run)["top1"], views)


def rows_of_readme():
    """Trained networks beside what the papers have, and the first sentences of the results."""
    for run in ("ea_long", "none_long"):
        last = last_of(run)
        yield "README.md", "", f"CIFAR-10, {last['epoch']:.0f} | {last['top1']:.2f} |"
    last = last_of(PA)
    epochs = last_row(f"fast-cifar10/{PA}.csv")["epoch"] + last["epoch"]
    yield "README.md", "", f"CIFAR-10, {epochs:.0f} | {last['top1']:.2f} |"
    epochs = load_recipe("pa_cifar10")["epochs"]
    for name in (AA, PA):
        yield "README.md", "", f"{published_top1(name, 'CIFAR-10'):.2f} ({epochs})"
    yield "README.md", "", f"{published_top1('ea_aa_resnet50', 'ImageNet'):.2f}, ImageNet"
    behind = published_top1(AA, "CIFAR-10") - last_of("none_long")["top1"]
    yield "README.md", "Results", f"{behind:.2f} points below its paper"
    yield PAGE, "CIFAR-10", f"the paper's AA {published_top1(AA, 'CIFAR-100'):.2f}"


def test_the_sizes_of_readmes_networks(capsys):
    rows = rows_of("README.md", r"\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| .*")
    assert len(rows) == 6
    names = [name for name, *_ in rows]
    assert main(["models", "--sizes", *names]) == 0
    printed = capsys.readouterr().out
    counted = re.findall(r"^\| (\w+) +\| \S+ +\| ([\d.]+) +\| ([\d.]+)", printed, re.M)
    assert sorted(counted) == sorted(rows)


# ---- other tables of docs, and speed ---------------------------------------------------------------------------------


def detectors_and_sentences():
    for name in ("plain", "aa", "ea_aa"):
        ap = [last_row(f"detection/{name}-seed{seed}.csv")["AP"] for seed in (0, 1)]
        yield "docs/detection.md", "Training", f"{np.mean(ap):.1f}"
    rows = table("sst.csv").groupby("network")["test"].mean()
    yield "docs/transformers.md", "", rows["none"], rows["PA"]


def large_images():
    sizes = table("large-maps-sizes.csv").query("network == 'ea' and code == 'after, in place'")
    ratios = sizes.set_index("malloc")["training, ratio"]
    again = f"{ratios['as it is']:.2f} of ResNet-50's rate instead of"
    yield "docs/kernels.md", "Large images", f"{again} {ratios['kept by environment']:.2f}"


def resnets_on_a_gpu():
    rows = table("h200/resnets.csv").set_index(["network", "implementation", "mode"])
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


def cifar_steps_on_a_gpu():
    steps = table("h200/cifar-steps.csv").query("batch == 512 and optimizer == 'batched muon'")
    ms = steps.set_index("mode")["ms"]
    yield "docs/kernels.md", "Speed on a GPU", ms["reduce-overhead"], ms["eager"]
    seconds = table("h200/cifar-epochs.csv")["seconds"]
    later = seconds[1:].median()
    whole = (seconds[0] + 59 * later) / 60
    yield "docs/faq.md", "", f"by estimate {whole:.0f} minutes on an H200"
    yield "docs/kernels.md", "Speed on a GPU", f"first epoch takes {seconds[0]:.0f} seconds"
    recipe = "ea_vision/recipes/cifar_long.yaml"
    yield recipe, "", f"{later:.1f} seconds per epoch", f"{seconds[0]:.0f} for the first"


CLAIMS = [function for function in [*globals().values()] if isgeneratorfunction(function)]


@pytest.mark.parametrize("claims", CLAIMS)
def test_the_pages_say_what_the_files_say(claims):
    for page, heading, *figures in claims():
        page_says(page, heading, *figures)

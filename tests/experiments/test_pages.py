"""The pages of experiments say what the files say: each figure that has a file is computed from it and looked for in
the section it belongs to, whatever words stand around it."""
import re
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import published, sensitivity
from experiments.evidence import by_variant, factorial, holm, paired, read_runs, shown_p
from experiments.factorial import analyse
from experiments.factorial.analyse import CELLS, FACTORS
from tests.experiments.pages import RESULTS, ROOT, cells, last_row, page_says, points, section, spread, table

FACTORIAL = ROOT / "experiments" / "factorial"
REST, SPEED = "all else: copies, layouts, sums, pooling", "Speed and memory on a CPU"
PAGE, QUESTIONS, HELP = "docs/experiments.md", "", "Does evolving attention help?"
EVOLUTION, CIFAR, MAPS = (f"experiments/{name}.md" for name in ("evolution", "cifar", "maps"))
SETS = ("cifar10", "cifar100")


def top1_of(path: Path) -> pd.DataFrame:
    return by_variant(read_runs(path))


def variant_row(name: str, top1: pd.Series) -> str:
    """Return a variant's row in the tables by seed."""
    return cells(name, ", ".join(f"{x:.2f}" for x in top1), f"{top1.mean():.2f}", f"{top1.std():.2f}")


def test_the_question_by_seeds():
    """EA - none in the first seeds, the fresh ones and all ten, at equal time; PA beside none."""
    by_data = [published.seeds_of(data) for data in SETS]
    for seeds in by_data[0]:
        gains = [paired(of[seeds]["EA"] - of[seeds]["none"]) for of in by_data]
        page_says(PAGE, HELP if seeds == "seeds 0 to 4" else QUESTIONS, *(points(of, "+").rstrip(")") for of in gains))
        if seeds == "seeds 0 to 4":
            page_says(PAGE, HELP, *(f"p = {of['p']:.3f}" for of in gains))
    first = [of["seeds 0 to 4"] for of in by_data]
    page_says(PAGE, HELP, *(points(paired(top1["PA"] - top1["none"])) for top1 in first))
    logits = table("replaced-maps/full-logits.csv")
    assert logits[logits["model"].str.startswith("pa_")]["correlation"].min() >= 0.999


@pytest.mark.parametrize("data", SETS)
def test_the_tables_by_seed(data):
    top1 = top1_of(RESULTS / "evidence" / f"{data}-runs.csv")
    assert top1.shape == (5, 7)
    page_says(EVOLUTION, "", *(variant_row(name, values) for name, values in top1.items()))
    means, gain = top1.mean(), paired(top1["EA"] - top1["none"])
    page_says(EVOLUTION, "", f"EA is {gain['difference']:.2f} points above none (95% interval {gain['low']:.2f} to "
              f"{gain['high']:.2f}", f"A fifth epoch brings none {means['none 5 epochs'] - means['none']:.2f} points "
              "(interval", f"and puts it {means['none 5 epochs'] - means['EA']:.2f} above EA (")


def test_settings_compared_on_held_out_images():
    """The variants with three seeds and their pairs; what was run at 16x16, with two."""
    runs = read_runs(RESULTS / "evidence" / "cifar10-held-out-runs.csv")
    is_fine = runs["variant"].str.contains("16x16")
    top1, fine = by_variant(runs[~is_fine]), by_variant(runs[is_fine])
    assert len(top1) == 3 and len(fine) == 2
    page_says(EVOLUTION, "", *(variant_row(name, values) for name, values in top1.items()))
    pairs = re.findall(r"^\| (EA[^|]*?) − ([^|]*) \| ([-\d.]+) \| ([-\d.]+ to [-\d.]+) \|$",
                       section(EVOLUTION, ""), re.M)
    assert len(set(pairs)) == 7
    for first, second, *shown in pairs:
        of = paired(top1[first] - top1[second])
        assert shown == [f"{of['difference']:.2f}", f"{of['low']:.2f} to {of['high']:.2f}"]
    ea, none = (" and ".join(f"{x:.2f}" for x in fine[f"{name} 16x16 too"]) for name in ("EA", "none"))
    page_says(EVOLUTION, "", f"EA {ea}, none {none}.")


def test_the_factorial(tmp_path):
    """The files are what the kept runs give, corrected as fixed before: Holm over four hypotheses, and two of time."""
    assert analyse.main([*(str(FACTORIAL / f"{data}-runs.csv") for data in SETS), "-o", str(tmp_path)]) == 0
    assert (tmp_path / "cifar10-runs.csv").read_text() == (FACTORIAL / "cifar10-runs.csv").read_text()
    made = pd.read_csv(tmp_path / "effects.csv")
    pd.testing.assert_frame_equal(made, pd.read_csv(FACTORIAL / "effects.csv"), rtol=1e-9)
    tested, is_time = made[made["p"].notna()], made["name"] == "EA - none equal time"
    assert set(tested["seeds"]) == {"5 to 9"} and len(tested) == 4 + 2
    for which in (tested[~is_time[tested.index]], tested[is_time[tested.index]]):
        assert which["p_holm"].tolist() == pytest.approx(holm(which["p"]))
    alone = analyse.analysed({"cifar10": analyse.read_fresh(FACTORIAL / "cifar10-runs.csv")})
    assert alone["p_holm"][:2].tolist() == pytest.approx(holm(alone["p"][:2], 4)), "still over four hypotheses"
    (tmp_path / "few.csv").write_text("".join((FACTORIAL / "cifar10-runs.csv").read_text().splitlines(True)[:2]))
    with pytest.raises(ValueError, match="seeds 5 to 9, no others|no runs of"):
        analyse.read_fresh(tmp_path / "few.csv")


def test_the_pages_have_the_factorial():
    """Skip and convolution on the page, all rows beside the protocol."""
    made = pd.read_csv(FACTORIAL / "effects.csv")
    rows = {(row["data"], row["name"], row["seeds"][:6]): row for row in made.to_dict("records")}
    for name, seeds, heading in (("convolution", "0 to 9", QUESTIONS), ("skip", "0 to 9", QUESTIONS), (
            "EA - none equal time", "5 to 9", QUESTIONS), ("skip", "5 to 9", HELP)):
        page_says(PAGE, heading, *(points(rows[data, name, seeds], "+") for data in SETS))
    page_says(PAGE, HELP,
              " and ".join(f"{rows[data, 'skip', '5 to 9']['p_holm']:.3f}" for data in SETS))
    paper = {row["label"]: row["top1"]["ImageNet"] for row in published.tables()["evolution"]["rows"]}
    page_says(PAGE, HELP, f"{paper['ea_aa_resnet34'] - paper['ea_aa_resnet34, without convolution']:+.2f}",
              " and ".join(f"{rows[data, 'convolution', '0 to 9']['high']:.2f}" for data in SETS))
    for seeds, label in (("", "{}"), ("5 to 9", "{}, seeds 5 to 9")):
        of = {data: factorial(top1_of(FACTORIAL / f"{data}-runs.csv" if seeds else
                                      RESULTS / "evidence" / f"{data}-runs.csv")[CELLS], FACTORS).to_dict("records")
              for data in SETS}
        for names, *both in zip(("skip connection", "convolution", "interaction"), *of.values(), strict=True):
            page_says("experiments/factorial/README.md", "Results", f"| {label.format(names)} | " + " | ".join(
                f"{points(one, '+')} | {shown_p(one['p'])}".rstrip() for one in both))


def test_what_each_study_could_have_found():
    kept = table("sensitivity.csv")
    pd.testing.assert_frame_equal(sensitivity.table(), kept)
    found = [f"{value:.2f}" for value in kept["found_at_80_percent"]]
    page_says("experiments/evolution.md", "What each study could have found",
              *(" | ".join(found[i:i + 2]) for i in (0, 2, 4)), *found[6:])
    page_says(PAGE, QUESTIONS, f"{min(found[:6])} to {max(found[:6])} points")


def test_equal_time_has_the_measured_ratio():
    ratios = sorted(round(float(ratio), 3) for ratio in table("evidence/time-ratio.csv")["ratio"])
    r = statistics.median(ratios)
    page_says("experiments/factorial/README.md", "Equal time", ", ".join(map(str, ratios)),
              f"{round(1560 * r):,} updates", "`--epochs 4.256`")
    assert round(390 * 4 * r) == round(390 * 4.256)
    page_says(PAGE, HELP, f"{r} times", f"{round(1560 * r):,} updates")


def test_other_settings_and_learned_gates():
    runs = by_variant(read_runs(RESULTS / "evidence" / "cifar10-held-out-runs.csv", variants=[
        "EA slower attention", "none slower attention"]))
    slower = paired(runs["EA slower attention"] - runs["none slower attention"])
    assert slower["high"] < 0
    kept = table("evidence/learned-gates.csv")
    learned = by_variant(read_runs(RESULTS / "evidence" / "cifar10-held-out-runs.csv", variants=["EA learned"]))
    assert kept.groupby("seed")["held_out_top1"].first().to_dict() == learned["EA learned"].to_dict()
    page_says(PAGE, "Other settings of evolution", points(slower), *(
        f"{kept[gate].min():.2f} {word} {kept[gate].max():.2f}" for gate, word in (("alpha", "to"), ("beta", "and"))))


def test_replaced_maps():
    figures = pd.concat([table(f"replaced-maps/{name}-replaced.csv") for name in ("full", "narrow")])
    figures["network"] = figures["model"].str.replace(r".*variant=(.*),seed=\d|\.fast_c10", r"\1", regex=True)
    means = figures.groupby(["network", "maps"])["top1"].mean().unstack()
    kinds = ["trained", "uniform", "mean", "other", "none", "own"]
    for network, row in means[kinds].iterrows():
        page_says(MAPS, "", cells(network, *(f"{x:.2f}" for x in row)).replace(" nan |", " |"))
    slower = [f"{x:.2f}" for x in table("replaced-maps/attention-lr-replaced.csv")["top1"]]
    page_says(MAPS, "", cells("that of the rest", *slower[:6]), cells("a quarter of it", *slower[6:]))
    page_says(PAGE, "What the networks owe to their maps", *(
        f"{means[maps][network]:.2f}" for network in ("ea_conv_transformer_cifar", "EA")
        for maps in ("trained", "other", "none")), f"{means.own['EA']:.2f}")
    healthy = table("replaced-maps/norm-replaced.csv").set_index("maps")["top1"]
    page_says(PAGE, "What the networks owe to their maps", *(
        f"{healthy[maps]:.2f}" for maps in ("trained", "other", "none")))
    page_says("experiments/healthy_maps/README.md", "Question 3: which findings were the collapse's?", *(
        f"{top1:.2f}" for top1 in (*healthy, *(healthy["trained"] - healthy[["none", "own"]]))))
    page_says(PAGE, QUESTIONS, f"{healthy['trained'] - healthy['none']:.1f}")
    without = table("replaced-maps/none-norm-replaced.csv").set_index("maps")["top1"]
    page_says("experiments/healthy_maps/README.md", "Question 3: which findings were the collapse's?", *(
        f"{top1:.2f}" for top1 in (*without, without["trained"] - without["none"])))
    lost = (means["trained"] - means["none"])[["none", "PA", "EA", "EA without skip", "EA without convolution"]]
    page_says(PAGE, QUESTIONS, f"{lost.min():.0f} to {lost.max():.0f} points",
              f"{means.trained['ea_conv_transformer_cifar'] - means.none['ea_conv_transformer_cifar']:.1f}")


@pytest.mark.parametrize("name", ["conv_transformer_cifar", "ea_conv_transformer_cifar"])
@pytest.mark.parametrize("rate, runs, maps", [("that of the rest", "fast-cifar10", "full"),
                                              ("a quarter of it", "attention-lr-cifar10", "attention-lr-10-epochs")])
def test_slower_attention(name, rate, runs, maps):
    last, figures = last_row(f"{runs}/{name}.csv"), table(f"replaced-maps/{maps}-replaced.csv")
    shown = " | ".join(f"{x:.2f}" for x in figures[figures["model"].str.match(rf"{name}\b")]["top1"])
    start = re.escape(f"| {name} | {rate} | {last['top1']:.2f} | ")
    assert last["epoch"] == 10 and re.search(rf"^{start}[\d.]+ \| {re.escape(shown)} \|", section(MAPS, ""), re.M)
    page_says(MAPS, "", f"{last['train_loss']:.4f}")


@pytest.mark.parametrize("recipe, row", [
    ("fast-sgd", r"^\| (\w+_cifar) +\| [\d.]+ +\| ([\d.]+) +\| ([\d.]+) +\| \d+ ()()"),
    ("fast", r"^\| (\w+_cifar) \| [\d.]+ \| ([\d.]+) \|(?: [\d.]+)? \| ([\d.]+) \| ([\d.]+) \| \d+ \|$")])
def test_the_recipes_of_ten_epochs(recipe, row):
    """The page's table and the recipe's own words have the figures of its runs."""
    runs = {path.stem: last_row(path) for path in (RESULTS / f"{recipe}-cifar10").glob("*.csv")}
    shown = {name: figures for name, *figures in re.findall(row, section(CIFAR, ""), re.M)}
    assert len(shown) == 5 and shown.keys() == runs.keys()
    expected = (ROOT / "ea_vision" / "recipes" / f"{recipe.replace('-', '_')}.yaml").read_text()
    for name, (top1, top5, *loss) in shown.items():
        assert [float(top1), float(top5)] == runs[name][["top1", "top5"]].tolist() and runs[name]["epoch"] == 10
        assert not loss[0] or loss[0] == f"{runs[name]['train_loss']:.4f}"
        assert re.search(rf"{top1}[^(]{{0,40}} \({name}\)", expected), name


def test_full_networks_on_cifar10():
    last = {kind: last_row(f"fast-cifar10/{name}_cifar.csv")["top1"] for kind, name in (
        ("`cnn_cifar` has", "cnn"), ("AA", "conv_transformer"), ("PA", "pa_conv_transformer"),
        ("EA", "ea_conv_transformer"))}
    page_says(PAGE, "CIFAR-10", *(f"{kind} {top1:.2f}" for kind, top1 in last.items()))
    page_says(PAGE, QUESTIONS, f"{min(last.values()):.1f} to {max(last.values()):.1f}%")


def test_maps_of_the_shipped_networks():
    figures = table("shipped-entropy.csv")
    for _, kept in figures.groupby(figures["model"].str.endswith("fast_norm_c10")):
        for column in (kept["entropy_share"], kept["largest"]):
            page_says(PAGE, "CIFAR-10", f"{column.min():.2f} to {column.max():.2f}")


def test_readme_has_the_three_figures_of_conv2d():
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/across-layers.md"))
    for figure in ("1.76", "4.42", "0.03"):
        assert figure in readme and figure in page


def test_muon_s_parameters_and_what_adamw_gains():
    kept = table("muon-parameters.csv")
    muon, adamw = (int(kept[f"{name}_tensors"].sum()) for name in ("muon", "adamw"))
    page_says("experiments/cifar.md", "CIFAR-10", f"{muon} of the EA network's {muon + adamw} parameters")
    trials = table("recipe-search/trials.csv").set_index("trial")["held_out_top1_by_epoch"].str.split().str[-1]
    base, changed = ([trials[name], trials[f"{name}-seed1"]] for name in ("t1-base", "t2-tables-classifier"))
    page_says("experiments/cifar.md", "CIFAR-10", " and ".join(changed), " and ".join(base))
    assert all(float(new) < float(old) for new, old in zip(changed, base, strict=True))


def test_scenes():
    """The table in docs, beside the protocol and on the cards; copies among the test photos."""
    for row in pd.read_csv(RESULTS / "scenes" / "results.csv", dtype=str).to_dict("records"):
        line = cells(row["model"], row["validation_top1"], row["top1"], row["interval"], row["minutes"])
        kind = row["model"].partition("_")[0].upper().replace("RESNET34", "plain")
        page_says(PAGE, "Scenes", f"{kind} {row['top1']}")
        page_says("experiments/scenes/README.md", "", line)
        last = table(f"scenes/{row['model']}.csv").iloc[-1]
        assert last["epoch"] == 10 and f"{last['top1']:.2f}" == row["validation_top1"] and row["images"] == "2534"
        if f"`{row['model']}`" in section("README.md", ""):
            page_says("README.md", "", f"{float(row['top1']):.1f} (10)")
    copies, without = table("scenes/copies.csv"), table("scenes/copies-top1.csv").set_index("model")
    other = sum(row.test.split("/")[0] != row.train.split("/")[0] for row in copies.itertuples())
    assert copies["test"].is_unique and without["new_images"].tolist() == [2534 - len(copies)] * 2
    known = f"{len(copies)} of the 2,534"
    page_says(PAGE, "Scenes", known, f"{other} of them", *(f"{x:.2f}" for x in without["new_top1"]))
    for name, row in without.iterrows():
        page_says(f"weights/{name}.md", "", f"{row.top1:.2f}% top-1", known, f"{row.new_top1:.2f}%")


def test_quarter_width_networks_and_distillation_on_scenes():
    path, protocol = RESULTS / "scenes" / "quarter-width-runs.csv", "experiments/scenes/README.md"
    assert {(run.images, run.updates) for run in read_runs(path).itertuples()} == {(2534, 812)}
    top1 = top1_of(path)
    for variant, values in top1.items():
        page_says(protocol, "", cells(variant, *(f"{x:.2f}" for x in (*values, values.mean()))))
    plain, aa, taught = (paired(top1[a] - top1[b]) for a, b in (("EA", "plain"), ("EA", "AA"), ("taught", "plain")))
    assert holm([plain["p"], aa["p"]]).tolist() == [1.0, 1.0]
    page_says(protocol, "", *(f"({of['low']:.2f} to {of['high']:.2f}" for of in (plain, aa, taught)))
    page_says(PAGE, "Scenes", *(f"{name} {top1[name].mean():.2f}" for name in ("plain", "AA", "EA")), points(aa, "+"),
              f"{top1['taught'].mean():.2f}, p = {taught['p']:.3f}")
    page_says(PAGE, QUESTIONS, points(plain), points(taught))
    page_says("docs/imagenet.md", "", f"{taught['difference']:+.2f} points")


def test_what_maps_of_scenes_tell():
    found = table("probe/scenes/results.csv").groupby(["model", "maps", "layer"])["top1"].apply(spread)
    faithful = table("faithfulness/scenes/results.csv").set_index(["ranking", "model"])
    networks = ("aa_resnet34_050", "ea_aa_resnet34_050")
    for network in networks:
        for maps in ("trained", "untrained", "shuffled"):
            page_says("experiments/scenes/README.md", "", cells(network, maps, *(
                found[network, maps, layer] for layer in (16, 17, 18))))
    for ranking in faithful.index.unique("ranking"):
        page_says("experiments/scenes/README.md", "", cells(ranking, *(
            f"{faithful.loc[(ranking, network), score]:.3f} ± {faithful.loc[(ranking, network), f'{score}_se']:.3f}"
            for score in ("comprehensiveness", "sufficiency") for network in networks)))


def test_fine_tuning_from_the_scenes_weights():
    top1 = top1_of(RESULTS / "scenes" / "fine-tuning-runs.csv")
    tuned, scratch = top1["fine-tuned"], top1["from scratch"]
    assert scratch.nunique() == 1
    page_says("experiments/scenes/README.md", "", f"mean {tuned.mean():.2f}", f"{scratch[0]:.2f}",
              points(paired(tuned - scratch)).replace(" ", " points ", 1).rstrip(")"))
    page_says("docs/fine-tune.md", "", f"{tuned.mean():.2f}", f"{scratch[0]:.2f}")


def test_the_picture_of_a_scene_shows_what_its_caption_says():
    maps = np.load(RESULTS / "scenes" / "scene.npz")["attn"].reshape(8, 2, 14, 14)
    for part, thing in ((maps[7, :, 2:6], "of its attention on the lit houses"), (maps[5, :, 7:], "on the road")):
        least, most = sorted(100 * part.sum((1, 2)))
        page_says(PAGE, "Scenes", f"{least:.0f} to {most:.0f}% {thing}")


def on_eyes(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of maps (..., 32, 32) on the cat's left and right eye."""
    return maps[..., 9:16, 6:14].mean((-2, -1)), maps[..., 11:18, 24:30].mean((-2, -1))


def test_pictures_of_a_pretrained_transformer_show_what_their_captions_say():
    kept = {name: maps.astype(float) for name, maps in np.load(RESULTS / "pretrained-maps.npz").items()}
    eyes = np.mean(on_eyes(kept["cls"]), 0)
    others = np.delete(eyes, 5)
    page_says("experiments/finetune_scenes/README.md", "", f"{eyes[5]:.1f} times",
              f"{others.min():.1f} to {others.max():.1f} times")

    def moved(first: str, second: str) -> np.ndarray:
        one, other = (kept[way] / kept[way].sum((1, 2), keepdims=True) for way in (first, second))
        return 50 * np.abs(one - other).sum((1, 2))

    for moves in ([*moved("before", "plain"), *moved("before", "gates")], moved("plain", "gates")):
        page_says("experiments/finetune_scenes/README.md", "", f"{min(moves):.0f} to {max(moves):.0f}%")


WAYS = {"plain": "Plain it has", "gates": "EA whose gates learn from 0", "residual": "residual maps",
        "conv2d": "conv2d"}


def test_fine_tuning_of_a_pretrained_transformer_on_scenes():
    heading, protocol = "Tuning a vision transformer", "experiments/finetune_scenes/README.md"
    top1 = top1_of(RESULTS / "finetune-scenes-runs.csv")
    assert set(top1) == set(WAYS) and len(top1) == 5
    effects = {way: paired(top1[way] - top1["plain"]) for way in WAYS if way != "plain"}
    p_holm = holm([effect["p"] for effect in effects.values()])
    for way, name in WAYS.items():
        page_says(PAGE, heading, f"{name} {spread(top1[way])}")
        page_says(protocol, "", cells(f"`{way}`", *(f"{x:.2f}" for x in (*top1[way], top1[way].mean()))))
    page_says(protocol, "", *(f"({of['low']:.2f} to {of['high']:.2f})" for of in effects.values()))
    page_says(protocol, "", " and ".join([", ".join(f"{p:.2f}" for p in p_holm[:2]), f"{p_holm[2]:.2f}"]))
    page_says(PAGE, QUESTIONS, points(effects["gates"]))
    page_says(PAGE, heading, points(effects["conv2d"]))
    kept = table("finetune-scenes-runs.csv")[["alpha", "beta"]].stack().dropna()
    gates = [abs(float(value)) for values in kept for value in values.split(" to ")]
    page_says(PAGE, heading, f"within {max(gates):.2f} of 0")
    maps = table("finetune-scenes-maps.csv").query("layer == 12").groupby("model")[
        ["entropy_share", "distance_pixels"]].mean()
    page_says(protocol, "", *(f"{maps.entropy_share[way]:.2f}" for way in ("before", "plain", "gates")),
              *(f"{maps.distance_pixels[way]:.0f}" for way in ("before", "plain", "gates")))


def test_the_table_of_the_probe():
    """Mean and standard deviation over three seeds, from images seen and unseen."""
    found = pd.concat([table(f"probe/{kind}/results.csv").assign(kind=kind) for kind in ("seen", "unseen")])
    found = found.groupby(["model", "maps", "kind", "layer"])["top1"].apply(spread)
    for network, label in (("conv", "AA"), ("pa_conv", "PA"), ("ea_conv", "EA")):
        for maps in ("trained", "untrained", "shuffled"):
            rows = found[f"{network}_transformer_cifar.fast_c10", maps]
            page_says(MAPS, "", f"| {label} | {maps} | " + " | ".join(
                rows[kind, layer] for kind in ("seen", "unseen") for layer in (3, 6)))


def test_detectors():
    for name, label in (("plain", "resnet18"), ("aa", "aa_resnet34, two blocks a stage"),
                        ("ea_aa", "ea_aa_resnet34, two blocks a stage")):
        runs = pd.DataFrame([last_row(f"detection/{name}-seed{seed}.csv") for seed in (0, 1)])
        ap, ap50 = ([f"{of[0]:.1f}, {of[1]:.1f}", f"{(of[0] + of[1]) / 2:.1f}"]
                    for of in (runs["AP"].tolist(), runs["AP50"].tolist()))
        page_says("experiments/detection.md", "", cells(label, *ap, *ap50, f"{sum(runs['AP75']) / 2:.1f}"))


def test_probe_and_faithfulness():
    probe = table("probe/unseen/results.csv").groupby(["model", "maps", "layer"])["top1"].mean()
    faithful = table("faithfulness/results.csv").set_index(["ranking", "model"])["comprehensiveness"]
    models = [f"{kind}_transformer_cifar.fast_c10" for kind in ("conv", "pa_conv", "ea_conv")]
    for maps in ("trained", "untrained"):
        for layer in (3, 6):
            page_says(PAGE, "The probe", *(f"{probe[model, maps, layer]:.2f}" for model in models))
    page_says(PAGE, "Faithfulness", *(f"{faithful['layer 6', model]:.3f}" for model in models), *(
        ", ".join(f"{faithful[ranking, model]:.3f}" for model in models) for ranking in ("centre", "random")))


def test_smaller_experiments():
    tiny = table("tiny-imagenet/attention.csv").query("images == 160").groupby("run")["top1"].mean() + 1e-9
    digits = table("moved-digits.csv").groupby("transform")["top1"].mean()
    page_says(PAGE, "Smaller experiments", f"{tiny['resnet34']:.1f}%", *(
        f"{kind.upper()} {tiny[name]:.1f}" for kind, name in (
            ("aa", "aa_resnet34"), ("pa", "pa_aa_resnet34"), ("ea", "ea_aa_resnet34"))),
        *(f"{digits[transform]:.2f}%" for transform in (True, False)))
    wide = table("wrn16-4-short.csv").groupby("model")["held_out_top1"].mean()
    page_says("experiments/cifar.md", "", f"{wide['wrn28_10_cifar'] - wide['aa_wrn28_10_cifar']:.1f} points")
    for name in ("share", "position"):
        for row in table(f"ablation/{name}.csv").itertuples():
            first = f"{row.share:g}" if name == "share" else row.position
            shown = [first, f"{row.params_m:.3f}", f"{row.mflops_profiler:.1f}", f"{row.held_out_top1:.2f}",
                     f"{row.train_loss:.3f}"]
            assert re.search(r"^\| " + r" +\| ".join(map(re.escape, shown)) + r" +\|$",
                             section("experiments/cifar.md", ""), re.M), shown


def test_speed():
    for row in table("benchmark-cpu.csv").query("part == 'network' and mode == 'eager'").itertuples():
        if row.model == "resnet50":
            page_says(PAGE, SPEED, *(f"{x:{form}}" for x, form in (
                (row.train_images_per_s, ".2f"), (row.infer_images_per_s, ".2f"), (row.memory_mib, ".0f"))))
        else:
            page_says(PAGE, SPEED, cells(row.model, *(
                f"{x:.2f}" for x in (row.train_ratio, row.infer_ratio, row.memory_ratio))))


def test_what_recording_costs():
    for row in table("recording-cost.csv").itertuples():
        page_says("docs/record.md", "Cost", cells(f"`{row.network}`", *(
            f"{x + 1e-6:.2f}" for x in (row.plain_s, row.recorded_s)), f"{row.maps_mib:.1f}"))


def test_large_maps():
    """The networks at 640 pixels, and the parts of a layer."""
    kept = table("large-maps.csv")
    shown = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$",
                       section("docs/kernels.md", "Large images"), re.M)
    assert shown == [(f"{infer + 1e-6:.2f}", f"{train + 1e-6:.2f}", f"{mib:,.0f}") for *_, infer, train, mib in
                     kept.itertuples(index=False)]
    parts = table("large-maps-parts.csv").pivot(index="part", columns=["pixels", "pass"], values="ms")
    for part, ms in parts.iterrows():
        page_says("experiments/kernels.md", "Parts of a layer on a CPU", f"| {part} | " + " | ".join(
            f"{ms[n, 'forward']:.1f} {'-' if ms[n, 'backward'] < 0 else '+'} "
            f"{abs(ms[n, 'backward']):.1f}" for n in (196, 400, 784)))


def test_the_search_of_widths():
    kept = table("widths/misses.csv")
    best = kept.groupby("kind")["largest_miss_percent"].min()
    page_says("docs/results.md", "", f"{best['doubled']:.0f}%", f"{best['rising']:.1f}%", f"{best['any']:.1f}%",
              f"{kept['cnn_params_m'][1]:.1f}M parameters")


def test_the_profile_of_deployed_networks():
    profile = table("onnx-profile.csv").set_index("operation")
    kinds = {"convolutions, also of maps": ["Conv"], "products": ["MatMul", "FusedMatMul"], "softmax": ["Softmax"]}
    sums = {name: profile.loc[of].sum() for name, of in kinds.items()}
    sums |= {REST: profile.sum() - sum(sums.values()), "all": profile.sum()}
    for name, times in sums.items():
        page_says("experiments/kernels.md", "", cells(name, *(f"{time + 1e-6:.0f}" for time in times)))
    page_says("docs/deploy.md", "Speed", *(f"{time + 1e-6:.0f}" for time in sums["all"]))

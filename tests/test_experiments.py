"""The page of experiments says what its files say: each figure that has a file is computed from it and looked up."""
import collections
import csv
import re
import runpy
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import sensitivity
from experiments.evidence import by_variant, compare, factorial, holm, paired, read_runs
from experiments.factorial import analyse
from experiments.factorial.analyse import CELLS, FACTORS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
PAGE = " ".join((ROOT / "docs" / "experiments.md").read_text().split())
SETS = ("cifar10", "cifar100")
FACTORIAL = ROOT / "experiments" / "factorial"


def rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((RESULTS / name).open()))


def evidence_of(path: Path) -> pd.DataFrame:
    return by_variant(read_runs(path))


def evidence(name: str) -> pd.DataFrame:
    return evidence_of(RESULTS / "evidence" / f"{name}-runs.csv")


def paired_difference(first, second) -> tuple[float, float, float, float]:
    found = paired(np.subtract(first, second))
    return found["difference"], found["low"], found["high"], found["p"]


def minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


def said(difference, low, high, plus="") -> str:
    return minus(f"{difference:{plus}.2f} ({low:.2f} to {high:.2f})")


def values(effect) -> tuple[float, float, float]:
    return effect.difference, effect.low, effect.high


def effects_of(top1: pd.DataFrame) -> list:
    return list(factorial(top1[CELLS], FACTORS).itertuples(index=False))


def test_the_page_is_short():
    assert len(PAGE.split()) <= 3700


def test_variants_of_both_data_sets():
    tables = [evidence(name) for name in SETS]
    for variant in tables[0]:
        cells = [f"{t[variant].mean():.2f} ± {t[variant].std():.2f}" for t in tables]
        assert f"| {variant} | {cells[0]} | {cells[1]} |" in PAGE


def test_the_question_and_equal_time():
    ten, hundred = map(evidence, SETS)
    gain = [paired_difference(t["EA"], t["none"]) for t in (ten, hundred)]
    first = said(*gain[0][:3], "+").replace(" ", " points ", 1)
    assert f"EA − none is {first} on CIFAR-10, {said(*gain[1][:3], '+')} on CIFAR-100" in PAGE
    assert f"p = {gain[0][3]:.3f} on CIFAR-10 (paired t test) and p = {gain[1][3]:.3f} on CIFAR-100" in PAGE
    above = [statistics.mean(t["none 5 epochs"]) - statistics.mean(t["EA"]) for t in (ten, hundred)]
    assert f"puts none {above[0]:.2f} and {above[1]:.2f} points above EA" in PAGE
    fresh = [paired_difference(top1["EA"], top1["none equal time"])
             for top1 in (evidence_of(FACTORIAL / f"{name}-runs.csv") for name in SETS)]
    at_equal_time = [minus(f"{difference:.2f} ({low:.2f} to {high:.2f}; p = {p:.3f}, corrected {p_holm:.3f})")
                     for (difference, low, high, p), p_holm in zip(fresh, holm([f[3] for f in fresh]), strict=True)]
    assert f"EA − none is {at_equal_time[0]} on CIFAR-10 and {at_equal_time[1]} on CIFAR-100" in PAGE
    first = said(*fresh[0][:3]).replace(" ", " points ", 1)
    assert f"EA − none is {first} on CIFAR-10, {said(*fresh[1][:3])} on CIFAR-100 | five fresh seeds" in PAGE
    (more, low, high, _), longer = (paired_difference(t["none 5 epochs"], t["none"]) for t in (ten, hundred))
    first = f"brings none {more:.2f} points ({low:.2f} to {high:.2f}) on CIFAR-10"
    assert f"{first} and {said(*longer[:3])} on CIFAR-100" in PAGE
    [pair] = compare(ten, ("EA", "none")).query("first == 'EA' and second == 'cnn'").itertuples()
    assert (f"is {-pair.difference:.2f} points ({-pair.high:.2f} to {-pair.low:.2f}; p = {pair.p_holm:.3f}, corrected "
            "for 20 pairs) above EA") in PAGE


def test_the_factorial_and_its_files():
    cells = []
    for name in SETS:
        effects = effects_of(evidence(name))
        kept = rows(f"evidence/{name}-factors.csv")
        assert [row["name"] for row in kept] == [effect.name for effect in effects]
        for row, effect in zip(kept, effects, strict=True):
            assert [float(row[key]) for key in ("difference", "low", "high")] == pytest.approx(
                [effect.difference, effect.low, effect.high])
        cells.append([f"{said(*values(e), '+')} | {'' if np.isnan(e.p) else f'{e.p:.3f} '}"
                      for e in effects])
    for label, ten, hundred in zip(("skip connection", "convolution", "interaction"), *cells, strict=True):
        assert f"| {label} | {ten}| {hundred}|" in PAGE, label
    skip, convolution = ([effects_of(evidence(name))[i].difference for name in SETS] for i in (0, 1))
    assert f"gain in these seeds ({skip[0]:+.2f} and {skip[1]:+.2f} points, looked at after the fact)" in PAGE
    assert max(convolution) < 0


def test_the_fresh_seeds_of_the_factorial():
    """experiments/factorial/effects.csv is what the kept runs give, and the page says it."""
    made = analyse.analysed({name: analyse.read_fresh(FACTORIAL / f"{name}-runs.csv") for name in SETS})
    pd.testing.assert_frame_equal(made, pd.read_csv(FACTORIAL / "effects.csv"), rtol=1e-9)
    p_holm = {(row.data, row.name): row.p_holm for row in made.dropna(subset="p_holm").itertuples(index=False)}
    fresh, ten = ({name: effects_of(top1) for name, top1 in tops.items()} for tops in (
        {name: evidence_of(FACTORIAL / f"{name}-runs.csv") for name in SETS},
        {name: pd.concat([evidence_of(FACTORIAL / f"{name}-runs.csv"), evidence(name)]) for name in SETS}))
    for label, *effects in zip(("skip connection", "convolution", "interaction"), *fresh.values(), strict=True):
        cells = [f"{said(*values(e), '+')} | {'' if np.isnan(e.p) else f'{e.p:.3f} '}" for e in effects]
        assert f"| {label}, seeds 5 to 9 | {cells[0]}| {cells[1]}|" in PAGE, label
    skip = [said(*values(fresh[name][0]), "+") for name in SETS]
    assert f"not confirmed by five fresh ones: {skip[0]} and {skip[1]} |" in PAGE
    shown = " and ".join(f"{p_holm[name, 'skip']:.3f}" for name in SETS)
    assert f"the four tests, its p is {shown}." in PAGE
    both = [said(*values(ten[name][0]), "+") for name in SETS]
    assert f"skip {both[0]} on CIFAR-10 and {both[1]} on CIFAR-100" in PAGE


def test_learned_gates():
    kept = rows("evidence/learned-gates.csv")
    runs = read_runs(RESULTS / "evidence" / "cifar10-held-out-runs.csv", variants=["EA learned"])
    assert {int(row["seed"]): float(row["held_out_top1"]) for row in kept} == by_variant(runs)["EA learned"].to_dict()
    assert len(kept) == 4 * len(runs)
    alpha, beta = ([float(row[gate]) for row in kept] for gate in ("alpha", "beta"))
    assert (f"lowers every alpha from 0.5 to {min(alpha):.2f} to {max(alpha):.2f}, and beta ends between "
            f"{min(beta):.2f} and {max(beta):.2f}") in PAGE


def test_muons_tables_and_classifier_by_adamw():
    trials = {row["trial"]: row for row in rows("recipe-search/trials.csv")}
    last = {name: trials[name]["held_out_top1_by_epoch"].split()[-1] for name in trials if name.startswith("t")}
    base, changed = ([last[name], last[f"{name}-seed1"]] for name in ("t1-base", "t2-tables-classifier"))
    assert f"gains nothing: {' and '.join(changed)}% of held-out images where `fast` has {' and '.join(base)} " in PAGE
    assert all(float(new) < float(old) for new, old in zip(changed, base, strict=True))
    both = "fallback_list=[\"*_rel\",\"head.fc.weight\"]"
    assert [both in trials[name]["command"] for name in last] == [name.startswith("t2") for name in last]


def test_sensitivity():
    kept = rows("evidence/sensitivity.csv")
    assert [{key: str(value) for key, value in sensitivity.row(name).items()} for name in SETS] == kept
    ten, hundred = kept
    assert (f"find a true difference of {ten['found_at_80_percent']} points on CIFAR-10 and "
            f"{hundred['found_at_80_percent']} on CIFAR-100 at 80% power") in PAGE
    assert f"seeds is {ten['mean_correlation']} and {hundred['mean_correlation']}, so pairing gains nothing" in PAGE
    pa, both = ([said(*(float(row[key]) for key in keys)) for row in kept]
                for keys in (("pa_minus_none", "pa_low", "pa_high"), ("ea_minus_none_and_pa", "ea_low", "ea_high")))
    assert f"it is {pa[0]} and {pa[1]} above none" in PAGE and f"both EA is {both[0]} and {both[1]} ahead" in PAGE
    logits = rows("replaced-maps/full-logits.csv")
    assert min(float(row["correlation"]) for row in logits if row["model"].startswith("pa_")) >= 0.999


def test_the_scenes_are_those_of_the_runs_and_of_the_cards():
    """The table of networks trained on photos of scenes, in docs and beside the protocol, and README's figures."""
    protocol, readme = ((ROOT / path).read_text() for path in ("experiments/scenes/README.md", "README.md"))
    runs = {row["model"]: row for row in rows("scenes/results.csv")}
    for name, row in runs.items():
        cells = f"| {name} | {row['validation_top1']} | {row['top1']} | {row['interval']} | {row['minutes']} |"
        assert cells in protocol and cells in PAGE
        last = rows(f"scenes/{name}.csv")[-1]
        assert last["epoch"] == "10" and f"{float(last['top1']):.2f}" == row["validation_top1"]
        assert row["images"] == "2534"
        card = ROOT / "weights" / f"{name}.scenes.md"
        if card.exists():
            assert f"{row['top1']}% top-1" in card.read_text()
        assert f"{float(row['top1']):.1f}% ({name})" in readme.replace("`", "")
    assert {"aa_resnet34_050", "ea_aa_resnet34_050"} <= set(runs)


def test_quarter_width_networks_and_distillation_on_scenes():
    protocol = " ".join((ROOT / "experiments" / "scenes" / "README.md").read_text().split())
    path = RESULTS / "scenes" / "quarter-width-runs.csv"
    assert {(run.images, run.updates) for run in read_runs(path).itertuples()} == {(2534, 812)}
    top1 = evidence_of(path)
    for variant, values in top1.items():
        assert f"| {variant} | {' | '.join(f'{x:.2f}' for x in (*values, statistics.mean(values)))} |" in protocol
    plain, aa, taught = (paired_difference(top1[a], top1[b])
                         for a, b in (("EA", "plain"), ("EA", "AA"), ("taught", "plain")))
    for difference, name, unit in ((plain, "EA - plain is", " points"), (aa, "EA - AA", ""),
                                   (taught, "taught - plain is", " points")):
        assert f"{name} {difference[0]:.2f}{unit} ({difference[1]:.2f} to {difference[2]:.2f}" in protocol
    assert {f"{p:.3f}" for p in holm([plain[3], aa[3]])} == {"1.000"} and f"p = {taught[3]:.3f})" in protocol
    means = {variant: f"{statistics.mean(values):.2f}" for variant, values in top1.items()}
    assert f"plain {means['plain']}, AA {means['AA']}, EA {means['EA']}. EA − plain is" in PAGE
    shown = [said(*difference[:3], "+") for difference in (plain, aa, taught)]
    assert f"EA − plain is {shown[0].replace(' ', ' points ', 1)}, EA − AA {shown[1]}: a gain" in PAGE
    assert f"has {means['taught']}, {shown[2][:-1]}, p = {taught[3]:.3f})" in PAGE
    assert f"[{taught[0]:+.2f} points](experiments.md#scenes)" in (ROOT / "docs" / "imagenet.md").read_text()


def test_what_maps_of_scenes_tell():
    text = (ROOT / "experiments" / "scenes" / "README.md").read_text()
    found = collections.defaultdict(list)
    for row in rows("probe/scenes/results.csv"):
        found[row["model"], row["maps"], row["layer"]].append(float(row["top1"]))
    faithfulness = {(row["model"], row["ranking"]): row for row in rows("faithfulness/scenes/results.csv")}
    networks = ("aa_resnet34_050", "ea_aa_resnet34_050")
    for network in networks:
        for maps in ("trained", "untrained", "shuffled"):
            cells = [f"{statistics.mean(top1):.2f} ± {statistics.stdev(top1):.2f}"
                     for top1 in (found[network, maps, layer] for layer in ("16", "17", "18"))]
            assert f"| {network} | {maps} | {' | '.join(cells)} |" in text
    for ranking in {ranking for _, ranking in faithfulness}:
        cells = [f"{float(faithfulness[network, ranking][score]):.3f} ± "
                 f"{float(faithfulness[network, ranking][score + '_se']):.3f}"
                 for score in ("comprehensiveness", "sufficiency") for network in networks]
        assert f"| {ranking} | {' | '.join(cells)} |" in text


def test_fine_tuning_from_the_scenes_weights():
    top1 = evidence_of(RESULTS / "scenes" / "fine-tuning-runs.csv")
    tuned, scratch = (top1[name].tolist() for name in ("fine-tuned", "from scratch"))
    text = " ".join((ROOT / "experiments" / "scenes" / "README.md").read_text().split())
    difference, low, high, p = paired_difference(tuned, scratch)
    figures = ", ".join(f"{value:.2f}" for value in tuned)
    assert len(set(scratch)) == 1
    assert (f"fine-tuned {figures} (mean {statistics.mean(tuned):.2f}), from scratch {scratch[0]:.2f} three "
            f"times; the difference is {difference:.2f} points ({low:.2f} to {high:.2f}, p = {p:.3f})") in text
    page = (ROOT / "docs" / "fine-tune.md").read_text()
    assert f"reach {statistics.mean(tuned):.2f}, from scratch {scratch[0]:.2f}" in page


def test_the_picture_of_a_scene_shows_what_its_caption_says():
    maps = np.load(RESULTS / "scenes" / "scene.npz")["attn"].reshape(8, 2, 14, 14)
    houses, road = (sorted(100 * part.sum((1, 2))) for part in (maps[7, :, 2:6], maps[5, :, 7:]))
    assert (f"head 7 spends {houses[0]:.0f} to {houses[1]:.0f}% of its attention on the lit houses (rows 2 to 5 of the "
            f"map), head 5 {road[0]:.0f} to {road[1]:.0f}% on the road (below row 6)") in PAGE


def on_eyes(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of maps (..., 32, 32) on the cat's left and right eye."""
    return maps[..., 9:16, 6:14].mean((-2, -1)), maps[..., 11:18, 24:30].mean((-2, -1))


def test_pictures_of_a_pretrained_transformer_show_what_their_captions_say():
    kept = {name: maps.astype(float) for name, maps in np.load(RESULTS / "pretrained-maps.npz").items()}
    eyes = np.mean(on_eyes(kept["cls"]), 0)
    others = np.delete(eyes, 5)
    page = " ".join((ROOT / "experiments" / "finetune_scenes" / "README.md").read_text().split())
    assert (f"Head 5 gives the eyes {eyes[5]:.1f} times what uniform attention would, the other heads "
            f"{others.min():.1f} to {others.max():.1f} times") in page

    def moved(first: str, second: str) -> np.ndarray:
        return 50 * np.abs(np.subtract(*(kept[way] / kept[way].sum((1, 2), keepdims=True) for way in (first, second)))
                           ).sum((1, 2))

    tuned, evolved = [*moved("before", "plain"), *moved("before", "gates")], moved("plain", "gates")
    assert (f"moves {min(tuned):.0f} to {max(tuned):.0f}% of a layer's attention to other patches; the two "
            f"tuned networks differ by {min(evolved):.0f} to {max(evolved):.0f}%") in page


WAYS = {"plain": "plain", "gates": "EA, gates learn from 0", "residual": "residual, likewise",
        "conv2d": "conv2d, likewise"}


def test_fine_tuning_of_a_pretrained_transformer_on_scenes():
    path = RESULTS / "finetune-scenes-runs.csv"
    top1 = evidence_of(path)
    assert set(top1) == set(WAYS) and len(top1) == 5
    effects = {way: paired_difference(top1[way], top1["plain"]) for way in WAYS if way != "plain"}
    corrected = dict(zip(effects, holm([effect[3] for effect in effects.values()]), strict=True))
    for way, name in WAYS.items():
        cells = f"| {name} | {statistics.mean(top1[way]):.2f} ± {statistics.stdev(top1[way]):.2f} |"
        if way != "plain":
            cells += f" {said(*effects[way][:3], '+')} | {corrected[way]:.2f} |"
        assert cells in PAGE
    protocol = " ".join((ROOT / "experiments" / "finetune_scenes" / "README.md").read_text().split())
    for way, values in top1.items():
        assert f"| `{way}` | {' | '.join(f'{x:.2f}' for x in (*values, statistics.mean(values)))} |" in protocol
    for way, (difference, low, high, _) in effects.items():
        assert f"`{way}` - `plain` {'is ' * (way == 'gates')}{difference:.2f}" in protocol
        assert f"{difference:.2f}{' points' * (way == 'gates')} ({low:.2f} to {high:.2f})" in protocol
    assert f"corrected p {' and '.join(', '.join(f'{p:.2f}' for p in corrected.values()).rsplit(', ', 1))}" in protocol
    ea = said(*effects["gates"][:3], "+").replace(" ", " points ", 1)
    assert f"EA − plain is {ea}; gates stay near 0" in PAGE
    assert f"leave room for {max(high for _, _, high, _ in effects.values()):.1f} points" in PAGE
    gates = [abs(float(value)) for row in rows(path.name) for name in ("alpha", "beta") if row[name]
             for value in row[name].split(" to ")]
    assert f"Gates end within {max(gates):.2f} of 0" in PAGE
    maps = collections.defaultdict(list)
    for row in rows("finetune-scenes-maps.csv"):
        maps[row["model"], row["layer"]].append([float(row["entropy_share"]), float(row["distance_pixels"])])
    before, plain, evolving = (np.mean(maps[way, "12"], 0) for way in ("before", "plain", "gates"))
    assert (f"entropy, as a share of uniform attention's, goes from {before[0]:.2f} to {plain[0]:.2f} (plain) and "
            f"{evolving[0]:.2f} (EA), its distance from {before[1]:.0f} to {plain[1]:.0f} and {evolving[1]:.0f} pixels"
            ) in PAGE


def test_replaced_maps():
    figures = collections.defaultdict(list)
    for table in ("full", "narrow"):
        for row in rows(f"replaced-maps/{table}-replaced.csv"):
            network = re.sub(r".*variant=(.*),seed=\d|\.fast_c10", r"\1", row["model"])
            figures[network, row["maps"]].append(float(row["top1"]))
    kinds = "10 epochs, one network|narrow, seeds 0 to 2"
    shown = re.findall(rf"\| (\w[^|]*?) \((?:{kinds})\) \|((?: [\d.]* ?\|){{4}})", PAGE)
    assert len(shown) == 5
    for network, cells in shown:
        expected = [f"{statistics.mean(values):.2f}" if (values := figures.get((network, kind))) else ""
                    for kind in ("trained", "other", "none", "own")]
        assert [cell.strip() for cell in cells.split("|")[:4]] == expected
    lost = [statistics.mean(figures[name, "trained"]) - statistics.mean(figures[name, "none"])
            for name in ("none", "PA", "EA", "EA without skip", "EA without convolution")]
    assert 16.5 <= min(lost) and max(lost) <= 20.5 and "17 to 20 points are lost without" in PAGE


def test_probe_and_faithfulness():
    figures = collections.defaultdict(list)
    for row in rows("probe/unseen/results.csv"):
        figures[row["model"].split("_transformer")[0], row["maps"], row["layer"]].append(float(row["top1"]))
    shown = re.findall(r"\| (AA|PA|EA) \| (trained|untrained) \| ([\d.]+) \| ([\d.]+) \|", PAGE)
    models = {"AA": "conv", "PA": "pa_conv", "EA": "ea_conv"}
    assert len(shown) == 5
    for name, maps, *cells in shown:
        assert cells == [f"{statistics.mean(figures[models[name], maps, layer]):.2f}" for layer in "36"]
    table = {(row["model"].split("_transformer")[0], row["ranking"]): row for row in rows("faithfulness/results.csv")}
    for ranking in ("layer 3", "layer 6", "centre", "random"):
        cells = " | ".join(f"{float(row['comprehensiveness']):.3f} ± {float(row['comprehensiveness_se']):.3f}"
                           for row in (table[model, ranking] for model in models.values()))
        assert f"| {ranking} | {cells} |" in PAGE


def test_smaller_experiments():
    def mean(table, column, **where):
        return f"{statistics.mean(float(r[column]) for r in table if where.items() <= r.items()):.2f}"

    table = [row for row in rows("tiny-imagenet/attention.csv") if row["images"] == "160"]
    resnet, aa, pa, ea = (statistics.mean(float(row["top1"]) for row in table if row["run"] == name)
                          for name in ("resnet34", "aa_resnet34", "pa_aa_resnet34", "ea_aa_resnet34"))
    assert f"resnet34 {resnet:.1f}%, AA {aa:.1f}, PA {pa:.1f}, EA {ea + 1e-9:.1f} (chance 5)" in PAGE
    digits = rows("moved-digits.csv")
    with_, without = (mean(digits, "top1", transform=value) for value in ("True", "False"))
    assert f"names {with_}% with its spatial transformer and {without}% without" in PAGE
    wide = rows("wrn16-4-short.csv")
    plain, aa = (statistics.mean(float(row["held_out_top1"]) for row in wide if row["model"] == name)
                 for name in ("wrn28_10_cifar", "aa_wrn28_10_cifar"))
    assert f"with AA is {plain - aa:.1f} points below the plain one" in PAGE
    first, *_, last = rows("ablation/share.csv")
    assert f"({first['held_out_top1']}% with share 0.25, {last['held_out_top1']}% with share 1)" in PAGE
    for name in ("share", "position"):
        text = (ROOT / "experiments" / "cifar.md").read_text()
        for row in rows(f"ablation/{name}.csv"):
            cells = [row[name], f"{float(row['params_m']):.3f}", f"{float(row['mflops_profiler']):.1f}",
                     f"{float(row['held_out_top1']):.2f}", f"{float(row['train_loss']):.3f}"]
            assert re.search(r"^\| " + r" +\| ".join(map(re.escape, cells)) + r" +\|$", text, re.M), cells


def test_speed():
    for row in rows("benchmark-cpu.csv"):
        if row["part"] == "network" and row["mode"] == "eager":
            cells = (f"{float(row['train_images_per_s']):.2f} | {float(row['train_ratio']):.2f} | "
                     f"{float(row['infer_images_per_s']):.2f} | {float(row['infer_ratio']):.2f} | "
                     f"{float(row['memory_mib']):.0f} | {float(row['memory_ratio']):.2f} |")
            spaced = r" *".join(map(re.escape, cells.split(" ")))
            assert re.search(rf"\| {row['model']} +\| {spaced}", PAGE), row["model"]


def test_equal_time_has_the_measured_ratio():
    ratios = sorted(round(float(row["ratio"]), 3) for row in rows("evidence/time-ratio.csv"))
    protocol = " ".join((ROOT / "experiments" / "factorial" / "README.md").read_text().split())
    r = statistics.median(ratios)
    assert f"r = {', '.join(map(str, ratios))}, median {r}, so `none` has {round(1560 * r):,} updates" in protocol
    assert round(390 * 4 * r) == round(390 * 4.256) and "`--epochs 4.256`" in protocol
    assert f"takes {r} times the processor time of one of none (five measurements, {ratios[0]} to {ratios[-1]})" in PAGE
    assert f"1560 × {r} = {round(1560 * r):,} updates" in PAGE


def test_muon_s_parameters_and_the_widths():
    made = runpy.run_path(str(ROOT / "experiments" / "muon_parameters.py"))["rows"]()
    kept = rows("muon-parameters.csv")
    assert [{key: str(value) for key, value in row.items()} for row in made] == kept
    muon, adamw = (sum(int(row[f"{name}_tensors"]) for row in kept) for name in ("muon", "adamw"))
    assert f"takes {muon} of the EA network's {muon + adamw} parameters, among them all 12 position tables" in PAGE
    tables, classifier, norms = (next(row for row in kept if row["part"] == part)
                                 for part in ("position tables", "classifier", "norms"))
    assert (tables["muon_tensors"], tables["adamw_tensors"], classifier["muon_tensors"]) == ("12", "0", "1")
    assert norms["muon_tensors"] == "0"


def test_the_search_of_widths_counts_as_the_networks_do():
    """Its formula gives our networks' parameters and operations; each row of its file is that formula's."""
    script = runpy.run_path(str(ROOT / "experiments" / "width_search.py"))
    kept = rows("widths/misses.csv")
    assert (kept[0]["cnn_params_m"], kept[0]["attention_params_m"]) == ("5.364", "4.984")  # as results.md counts
    assert (kept[0]["cnn_operations_g"], kept[0]["attention_operations_g"]) == ("0.966", "0.943")
    for row in kept:
        reading = {key: row[key] for key in script["READINGS"]} | {"counting": int(row["counting"])}
        made = script["row"](row["kind"], [int(width) for width in row["widths"].split()], reading)
        assert {key: str(value) for key, value in made.items()} == row
    best = {kind: min(float(row["largest_miss_percent"]) for row in kept if row["kind"] == kind)
            for kind in ("any", "rising", "doubled")}
    remark = (ROOT / "docs" / "results.md").read_text()
    assert (f"doubled widths miss one by {best['doubled']:.0f}%, rising ones by {best['rising']:.1f}%, any by "
            f"{best['any']:.1f}%") in remark
    assert f"512: {float(kept[1]['cnn_params_m']):.1f}M parameters" in remark


def test_the_fixed_analysis(tmp_path, capsys):
    """experiments/factorial/analyse.py on made-up runs: Holm's correction over four hypotheses, by hand."""
    header = "variant,seed,test_top1,train_loss,seconds,images,updates,data,options\n"
    for name, gain in (("cifar10", 1.0), ("cifar100", 0.1)):
        top1 = {(cell, seed): 50 + gain * (cell in CELLS[2:]) + (seed * 7 + 3 * i) % 5 / 10
                for i, cell in enumerate(CELLS) for seed in range(5, 10)}
        lines = [f"{cell},{seed},{value:.2f},1.0,9,10000,4,{name},\n" for (cell, seed), value in top1.items()]
        (tmp_path / f"{name}-seeds.csv").write_text(header + "".join(lines))
    sources = [str(tmp_path / f"{name}-seeds.csv") for name in SETS]
    assert analyse.main([*sources, "-o", str(tmp_path)]) == 0
    made = pd.read_csv(tmp_path / "effects.csv")
    fresh = made[(made["seeds"] == "5 to 9") & made["p"].notna()]
    assert fresh[["data", "name"]].values.tolist() == [[d, n] for d in SETS for n in ("skip", "convolution")]
    assert fresh["p_holm"].tolist() == pytest.approx(holm(fresh["p"]))
    assert made[made["seeds"] != "5 to 9"]["p"].isna().all() and len(made) == 12
    assert fresh["difference"].iloc[0] == pytest.approx(1.0, abs=0.2)
    assert analyse.main([sources[0], "-o", str(tmp_path / "alone")]) == 0
    alone = pd.read_csv(tmp_path / "alone" / "effects.csv")
    assert alone["p_holm"][:2].tolist() == pytest.approx(holm(alone["p"][:2], 4)), "still over four hypotheses"
    longer = {seed: 50 + (seed * 11) % 7 / 10 for seed in range(5, 10)}
    with (tmp_path / "cifar10-seeds.csv").open("a") as file:
        file.writelines(f"none equal time,{seed},{top1:.2f},1.0,9,10000,5,cifar10,\n" for seed, top1 in longer.items())
    assert analyse.main([*sources, "-o", str(tmp_path)]) == 0
    with_time = pd.read_csv(tmp_path / "effects.csv")
    is_time = with_time["name"] == "EA - none equal time"
    pd.testing.assert_frame_equal(with_time[~is_time].reset_index(drop=True), made)
    [time] = with_time[is_time].itertuples()
    difference, _, _, p = paired_difference(evidence_of(tmp_path / "cifar10-seeds.csv")["EA"], list(longer.values()))
    assert (time.difference, time.p, time.p_holm) == pytest.approx((difference, p, min(1.0, 2 * p)))
    assert "none equal time" in (tmp_path / "cifar10-runs.csv").read_text()
    (tmp_path / "cifar10-few.csv").write_text(header + "".join(f"{cell},5,50.0,1.0,9,10000,4,d,\n" for cell in CELLS))
    with pytest.raises(ValueError, match="seeds 5 to 9, no others"):
        analyse.main([str(tmp_path / "cifar10-few.csv"), "-o", str(tmp_path)])


def test_the_profile_of_deployed_networks():
    page = (ROOT / "docs" / "deploy.md").read_text()
    profile = {row["operation"]: [float(row[name]) for name in ("resnet50", "aa_resnet50", "ea_aa_resnet50")]
               for row in rows("onnx-profile.csv")}
    parts = {"convolutions, also of maps": ["Conv"], "products": ["MatMul", "FusedMatMul"], "softmax": ["Softmax"]}
    sums = {name: [sum(times) for times in zip(*map(profile.pop, kinds), strict=True)] for name, kinds in parts.items()}
    needed = [sum(times) for times in zip(*sums.values(), strict=True)]
    sums["all else: copies, layouts, sums, pooling"] = [sum(times) for times in zip(*profile.values(), strict=True)]
    sums["all"] = [sum(times) for times in zip(*sums.values(), strict=True)]
    for name, times in sums.items():
        assert f"| {name} | {' | '.join(f'{time:.0f}' for time in times)} |" in page
    ratios = [sums["all"][0] / time for time in needed[1:]]
    assert f"AA would be at {ratios[0]:.2f} and EA at {ratios[1]:.2f} if all else cost nothing" in page

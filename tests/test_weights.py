"""The shipped weights load by name, without a network, and have a card that says what they reach."""
import collections
import csv
import re
import statistics
import tarfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import adapt_input_conv

import ea_vision  # noqa: F401
from experiments.evidence import by_variant, paired, read_runs
from experiments.weights_card import by_update
from tests.slow import slow_but

OURS = timm.list_models(module="conv_transformer") + timm.list_models(module="attn_resnet")
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = [name for name in timm.list_pretrained() if name.split(".")[0] in OURS]


def written() -> str:
    """The page of experiments and the files with its tables."""
    return "\n".join(path.read_text() for path in [ROOT / "docs" / "experiments.md",
                                                   *sorted((ROOT / "experiments").glob("*.md"))])


def test_each_has_its_card():
    assert {"ea_conv_transformer_cifar", "conv_transformer_cifar"} <= {name.split(".")[0] for name in SHIPPED}
    for name in SHIPPED:
        card = Path(timm.get_pretrained_cfg(name).file).with_suffix(".md").read_text()
        assert name in card and re.search(r"\d\d\.\d\d% top-1", card) and "commit" in card and "SHA-256" in card


@pytest.mark.parametrize("name", slow_but({"ea_conv_transformer_cifar.fast_c10"}, SHIPPED))
def test_weights_are_adapted_in_timms_ways(name):
    plain = timm.create_model(name, pretrained=True).eval()
    side = plain.default_cfg["input_size"][-1]
    x = torch.randn(1, 1, side, side)
    with torch.no_grad():
        grey = timm.create_model(name, pretrained=True, in_chans=1).eval()
        rounding = dict(atol=0.02, rtol=0.01)  # the file's half precision, in which timm adapts the stem
        torch.testing.assert_close(grey(x), plain(x.expand(-1, 3, -1, -1)), **rounding)

        four = timm.create_model(name, pretrained=True, in_chans=4, num_classes=3)
        stem = plain.get_submodule(plain.default_cfg["first_conv"]).weight
        adapted = four.get_submodule(plain.default_cfg["first_conv"]).weight
        torch.testing.assert_close(adapted.detach(), adapt_input_conv(4, stem), atol=1e-3, rtol=1e-3)
        assert four(torch.randn(2, 4, side, side)).shape == (2, 3)

        # the tables are resized on load, as the plain network resizes them at every call
        size = (side * 5 // 4, side * 3 // 2)
        larger, x = timm.create_model(name, pretrained=True, img_size=size).eval(), torch.randn(1, 3, *size)
        torch.testing.assert_close(larger(x), plain(x), atol=1e-4, rtol=1e-4)

        features = timm.create_model(name, pretrained=True, features_only=True).eval()
        torch.testing.assert_close(features(x)[-1], plain.forward_features(x))


def test_cards_say_which_updates_an_earlier_start_made():
    starts = [{"update": update, "by": by} for update, by in ((1, "a"), (11, "a"), (21, "b"), (31, "c"), (41, "b"))]
    assert by_update(starts, lambda start: start["by"]) == "b (updates 1 to 20: a; updates 31 to 40: c)"
    assert by_update(starts[1:2], lambda start: start["by"]) == "a (updates 1 to 10: not recorded)"
    assert by_update(starts[:1], lambda start: start["by"]) == "a"


def test_results_are_those_of_the_cards():
    rows = list(csv.DictReader((ROOT / "experiments" / "results" / "results-cifar10.csv").open()))
    ten = {name for name in SHIPPED if timm.get_pretrained_cfg(name).num_classes == 10}
    assert {row["model"] for row in rows} == ten  # else `python experiments/shipped_weights.py` is due
    for row in rows:
        card = Path(timm.get_pretrained_cfg(row["model"]).file).with_suffix(".md").read_text()
        top1, top5 = map(float, re.search(r"(\d+\.\d+)% top-1, (\d+\.\d+)% top-5", card).groups())
        assert float(row["top1"]) == pytest.approx(top1, abs=0.05)
        assert float(row["top5"]) == pytest.approx(top5, abs=0.05)
        assert float(row["top1"]) + float(row["top1_err"]) == pytest.approx(100)


def test_docs_have_the_results_of_the_runs():
    """Its table of the `fast_sgd` recipe's 10 epochs, against the metrics of those runs and the recipe's own words."""
    runs = {path.stem: list(csv.DictReader(path.open()))
            for path in (ROOT / "experiments" / "results" / "fast-sgd-cifar10").glob("*.csv")}
    row = re.compile(r"^\| (\w+_cifar) +\| [\d.]+ +\| (\d\d\.\d\d) +\| (\d\d\.\d\d) +\| \d+ ", re.MULTILINE)
    text = written()
    shown = {name: (float(top1), float(top5)) for name, top1, top5 in row.findall(text)}
    assert shown == {name: (float(rows[-1]["top1"]), float(rows[-1]["top5"])) for name, rows in runs.items()}
    assert len(shown) == 5 and all(rows[-1]["epoch"] == "10" for rows in runs.values())
    expected = (ROOT / "ea_vision" / "recipes" / "fast_sgd.yaml").read_text()
    assert all(f"{top1:.2f} ({name})" in expected for name, (top1, _) in shown.items())


def test_docs_have_the_results_of_the_shipped_weights_runs():
    """The table of the `fast` recipe's 10 epochs, likewise; two of its networks have no weights here."""
    runs = {path.stem: list(csv.DictReader(path.open()))[-1]
            for path in (ROOT / "experiments" / "results" / "fast-cifar10").glob("*.csv")}
    row = re.compile(r"^\| (\w+_cifar) \| [\d.]+ \| ([\d.]+) \|(?: ([\d.]+))? \| ([\d.]+) \| ([\d.]+) \| \d+ \|$",
                     re.MULTILINE)
    shown = {name: figures for name, *figures in row.findall(written())}
    assert set(shown) == set(runs) == {*(name.split(".")[0] for name in SHIPPED if name.endswith("_c10")),
                                      "cnn_cifar", "resnet18_cifar"}
    expected = (ROOT / "ea_vision" / "recipes" / "fast.yaml").read_text().replace("\n#          ", "")
    for name, (top1, views, top5, loss) in shown.items():
        last = runs[name]
        assert last["epoch"] == "10" and [top1, top5, loss] == [
            f"{float(last[key]):.{digits}f}" for key, digits in (("top1", 2), ("top5", 2), ("train_loss", 4))]
        if views:
            assert float(views) > float(top1)
            assert f"{top1}, with six views {views} ({name})" in expected or f"{top1}, {views} ({name})" in expected
        else:
            assert f"{top1} ({name})" in expected and name in ("cnn_cifar", "resnet18_cifar")


def variant_row(variant, top1):
    """A variant's row in the tables of docs/experiments.md."""
    shown = ", ".join(f"{value:.2f}" for value in top1)
    return f"| {variant} | {shown} | {statistics.mean(top1):.2f} | {statistics.stdev(top1):.2f} |\n"


def replaced_maps(table):
    """The rows of a table of experiments/results/replaced-maps."""
    return list(csv.DictReader((ROOT / "experiments" / "results" / "replaced-maps" / f"{table}-replaced.csv").open()))


@pytest.mark.parametrize("dataset, variants", [("cifar10", 7), ("cifar100", 7)])
def test_docs_have_the_evidence(dataset, variants):
    """The tables of docs/experiments.md and the answers to its question, against the runs."""
    runs = by_variant(read_runs(ROOT / "experiments" / "results" / "evidence" / f"{dataset}-runs.csv"))
    assert list(runs.index) == list(range(5))
    text = written()
    assert runs.shape[1] == variants
    for variant, top1 in runs.items():
        assert variant_row(variant, top1) in text
    gains = [ea - none for ea, none in zip(runs["EA"], runs["none"], strict=True)]
    mean, margin = statistics.mean(gains), 2.776 * statistics.stdev(gains) / 5 ** 0.5  # t of 4 degrees of freedom
    assert f"EA is {mean:.2f} points above none (95% interval {mean - margin:.2f} to {mean + margin:.2f}" in text
    means = runs.mean()
    assert f"A fifth epoch brings none {means['none 5 epochs'] - means['none']:.2f} points (interval" in text
    assert f"and puts it {means['none 5 epochs'] - means['EA']:.2f} above EA (" in text.replace("\n  ", " ")


def test_docs_have_the_settings_compared_on_held_out_images():
    """The tables of the variants with three seeds and of their pairs; what was run at 16x16, with two."""
    runs = read_runs(ROOT / "experiments" / "results" / "evidence" / "cifar10-held-out-runs.csv")
    text = written()
    assert runs["variant"].nunique() == 10 and len(runs) == 28
    is_fine = runs["variant"].str.contains("16x16")
    top1, fine = by_variant(runs[~is_fine]), by_variant(runs[is_fine])
    for variant, values in top1.items():
        assert variant_row(variant, values) in text
    pairs = set(re.findall(r"^\| (EA [^|]*|EA) − ([^|]*) \| ([-\d.]+) \| ([-\d.]+ to [-\d.]+) \|$", text, re.M))
    assert len(pairs) == 7
    for first, second, difference, interval in pairs:
        pair = paired(top1[first] - top1[second])
        assert (difference, interval) == (f"{pair['difference']:.2f}", f"{pair['low']:.2f} to {pair['high']:.2f}")
    ea, none = (" and ".join(f"{top1:.2f}" for top1 in fine[f"{name} 16x16 too"]) for name in ("EA", "none"))
    assert f"EA {ea}, none {none}." in text


def test_docs_have_the_results_of_the_probe():
    """The table of docs/experiments.md: mean and standard deviation over three seeds, from images seen and unseen."""
    figures = collections.defaultdict(list)
    for kind in ("seen", "unseen"):
        for row in csv.DictReader((ROOT / "experiments" / "results" / "probe" / kind / "results.csv").open()):
            figures[row["model"], row["maps"], kind, row["layer"]].append(float(row["top1"]))
    text = written()
    for network, label in (("conv", "AA"), ("pa_conv", "PA"), ("ea_conv", "EA")):
        for maps in ("trained", "untrained", "shuffled"):
            top1 = [figures[f"{network}_transformer_cifar.fast_c10", maps, kind, layer]
                    for kind in ("seen", "unseen") for layer in "36"]
            assert all(len(seeds) == 3 for seeds in top1)
            cells = " | ".join(f"{statistics.mean(seeds):.2f} ± {statistics.stdev(seeds):.2f}" for seeds in top1)
            assert f"| {label} | {maps} | {cells} |\n" in text


def test_docs_have_the_results_of_replaced_maps():
    """The table of docs/experiments.md: the mean over seeds of each network's figures."""
    kinds = ("trained", "uniform", "mean", "other", "none", "own")
    figures = collections.defaultdict(list)
    for table in ("full", "narrow"):
        for row in replaced_maps(table):
            network = re.sub(r".*variant=(.*),seed=\d|\.fast_c10", r"\1", row["model"])
            figures[network, row["maps"]].append(float(row["top1"]))
    text = written()
    networks = {network for network, _ in figures}
    assert len(networks) == 8 and len(figures["EA", "own"]) == 3
    for network in networks:
        cells = [f"{sum(values) / len(values):.2f}" if (values := figures.get((network, kind))) else ""
                 for kind in kinds]
        assert f"| {network} | {' | '.join(cells)}".rstrip() + " |\n" in text
    slower = [f"{float(row['top1']):.2f}" for row in replaced_maps("attention-lr")]
    for label, cells in (("that of the rest", slower[:6]), ("a quarter of it", slower[6:])):
        assert f"| {label} | {' | '.join(cells)} |\n" in text


def test_docs_have_the_results_of_slower_attention():
    """The table of the 10 epochs with --attention-lr, against their runs and the tables of replaced maps."""
    results = ROOT / "experiments" / "results"
    text = written()
    for name in ("conv_transformer_cifar", "ea_conv_transformer_cifar"):
        for rate, runs, table in (("that of the rest", "fast-cifar10", "full"),
                                  ("a quarter of it", "attention-lr-cifar10", "attention-lr-10-epochs")):
            last = list(csv.DictReader((results / runs / f"{name}.csv").open()))[-1]
            cells = [f"{float(row['top1']):.2f}" for row in replaced_maps(table)
                     if re.match(rf"{name}\b", row["model"])]
            shown = re.escape(f"{float(last['top1']):.2f}") + r" \| [\d.]+ \| " + re.escape(" | ".join(cells))
            assert last["epoch"] == "10" and len(cells) >= 5
            assert re.search(rf"^\| {name} \| {rate} \| {shown} \|", text, re.MULTILINE), (name, rate)
            assert f"{float(last['train_loss']):.4f}" in text


@pytest.mark.parametrize("name", slow_but({"ea_conv_transformer_cifar.fast_c10"},
                                          [name for name in SHIPPED if name.endswith("_c10")]))
def test_weights_know_their_images(name, shared):
    model = timm.create_model(name, pretrained=True).eval()
    cfg, images, targets = model.pretrained_cfg, [], []
    with tarfile.open(shared / "data" / "cifar10" / "test.tar") as tar:
        for member in [m for m in tar if m.isfile()][::50]:  # 200 images, all classes
            images.append(np.asarray(Image.open(tar.extractfile(member)).convert("RGB")))
            targets.append(cfg["label_names"].index(member.name.split("/")[-2]))
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        predicted = model((x - mean) / std).argmax(1)
    assert (predicted == torch.tensor(targets)).float().mean() > 0.65


def test_docs_have_the_results_of_the_detectors():
    """The table of experiments/detection.md, against the metrics of its runs."""
    text = (ROOT / "experiments" / "detection.md").read_text()
    for name, label in (("plain", "resnet18"), ("aa", "aa_resnet34"), ("ea_aa", "ea_aa_resnet34")):
        folder = ROOT / "experiments" / "results" / "detection"
        last = [list(csv.DictReader((folder / f"{name}-seed{seed}.csv").open()))[-1] for seed in (0, 1)]
        ap, ap50, ap75 = ([float(row[column]) for row in last] for column in ("AP", "AP50", "AP75"))
        cells = [*(f"{a:.1f}, {b:.1f} | {(a + b) / 2:.1f}" for a, b in (ap, ap50)), f"{sum(ap75) / 2:.1f} |"]
        [row] = [line for line in text.splitlines() if line.startswith((f"| {label} |", f"| {label}, two blocks"))]
        assert row.endswith(" | ".join(cells))

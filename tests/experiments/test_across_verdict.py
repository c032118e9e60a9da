"""The verdict on attention across layers: its analysis on made-up runs (what is compared, corrected, left out), and the
script that makes its runs."""
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from scipy import stats

from ea_vision.base.errors import UsageError
from ea_vision.sizes import count
from experiments import sweep
from experiments.across import analyse, power, run
from experiments.across.plan import (
    AS_GATED,
    AS_TOKEN_CONV,
    AS_XSA,
    EPOCHS,
    EVEN,
    LONG_CONV2D,
    LONG_TOKEN_CONV,
    NETWORKS,
    PARTS,
    RESULTS,
    RIVAL,
    RUNS,
    SECOND,
    VIT,
    mechanism,
    step_times,
)
from experiments.across.sequences import recall
from experiments.evidence import by_variant, read_runs, write_runs
from tests.experiments.pages import page_says, points, section

ROOT = Path(__file__).resolve().parents[2]
FACTORIAL = ROOT / "experiments" / "factorial"
PAGE, CHANCES = "docs/across-layers.md", "What these seeds could have found"


def test_each_part_against_its_baseline_by_hand():
    rows = {(row.part, row.name): row for row in pd.read_csv(RESULTS / "verdict.csv").itertuples(index=False)}
    rival, top1 = PARTS["vit-rival"], by_variant(read_runs(RESULTS / "vit-rival.csv"))
    assert len(rows) == 5 + 1 + 1 + 2 + 3 + 5
    p_values = {name: stats.ttest_1samp(top1[name] - top1["token_conv"], 0).pvalue for name in rival.tested}
    for name, p in p_values.items():
        row, differences = rows["vit-rival", name], top1[name] - top1["token_conv"]
        assert (row.difference, row.p) == pytest.approx((differences.mean(), p))
        found = power.power(row.found_at_80_percent, differences.std() / 2 ** 0.5, 8, 5)
        assert found == pytest.approx(0.8, abs=0.05)  # the gains are rounded to 0.01
    conv2d, longer, same = (rows[part, "conv2d"] for part in ("vit-rival", "equal-time", "equal-operations"))
    assert min(p_values, key=p_values.get) == "conv2d" and conv2d.p_holm == pytest.approx(5 * p_values["conv2d"])
    of_longer = by_variant(read_runs(RESULTS / "equal-time.csv"))["token_conv longer"]
    assert longer.difference == pytest.approx((top1["conv2d"] - of_longer).mean()) and longer.p_holm == longer.p
    assert np.isnan(same.p) and same.time_ratio == pytest.approx(8 / 10.02 * conv2d.time_ratio, abs=0.01)
    assert [name for (part, name), row in rows.items() if part == "cifar100" and np.isnan(row.p_holm)] == ["uniform"]
    assert all(np.isnan(row.p) for (part, _), row in rows.items() if part in ("vit-dear", "vit-alone"))


def test_an_incomplete_part_is_left_out_and_named(tmp_path, capsys):
    for name, lines in (("vit-alone", None), ("cifar100", -1)):
        (tmp_path / f"{name}.csv").write_text("".join((RESULTS / f"{name}.csv").read_text().splitlines(True)[:lines]))
    analyse.main([str(tmp_path), "-o", str(tmp_path / "out")])
    assert set(pd.read_csv(tmp_path / "out" / "verdict.csv")["part"]) == {"vit-alone"}
    said = capsys.readouterr().out
    assert "left out: cifar100: 1 runs are missing, the first is uniform, seed 105" in said
    assert "left out: vit-dear: runs of vit-dear and vit-rival are required" in said
    assert (tmp_path / "out" / "verdict.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_with_a_row_are_not_made_again_and_seeds_come_one_after_another(tmp_path, monkeypatch):
    made = []

    def train(command, folder, seed):
        made.append(folder.name)
        return {**kept.drop(columns="variant").iloc[0], "seed": seed, "top1": float(len(made))}

    monkeypatch.setenv("TIMM_FUSED_ATTN", "1")  # put back afterwards
    monkeypatch.setattr(sweep, "train", train)
    part, out = PARTS["vit-alone"], tmp_path / "rows"
    out.mkdir()
    kept = read_runs(RESULTS / "vit-alone.csv", variants=["plain", "uniform"]).iloc[[0, -1]]
    write_runs(kept, out / "vit-alone.csv")
    command = [str(tmp_path / "runs"), "--cifar10", "ten", "-o", str(out)]
    assert run.main([*command, "--parts", "vit-alone"]) == 0
    assert made == [f"vit-alone,{variant},{seed}" for seed in part.seeds for variant in part.own
                    if (variant, seed) not in set(zip(kept["variant"], kept["seed"], strict=True))]
    rows = read_runs(out / "vit-alone.csv", variants=part.own)
    assert set(rows["split"]) == {"test"} and len(rows) == len(part.own) * len(part.seeds)
    assert rows["top1"].iloc[0] == kept["top1"].iloc[0] and rows["options"].iloc[1].startswith("vit_mini_patch4_32")
    run.main([*command, "--only", "vit-alone", "conv2d", "103"])
    assert made[-1] == "vit-alone,conv2d,103" and len(read_runs(out / "vit-alone.csv")) == len(rows)
    for wrong, message in ((["--only", "vit-dear", "conv2d", "100"], "vit-dear conv2d: .*vit-dear: refiner, mta"),
                           (["--parts", "cifar100"], "cifar100 needs --cifar100 DIR")):
        with pytest.raises(UsageError, match=message):
            run.main([*command, *wrong])


def test_equal_operations_are_those_that_are_counted():
    network = NETWORKS[RIVAL]
    with torch.device("meta"):
        plain, conv2d = (count(timm.create_model(network.model, **network.keywords, **more), (3, 32, 32)).macs
                         for more in ({}, mechanism(RIVAL, "conv2d")))
    assert EPOCHS[EVEN] == round(8 * conv2d / plain, 2)


def test_the_pages_say_what_the_kept_runs_say(tmp_path, capsys):
    """verdict.csv is what the rows of runs give, and the pages have its tables and figures."""
    assert analyse.main([str(RESULTS), "-o", str(tmp_path)]) == 0
    kept, made = (pd.read_csv(folder / "verdict.csv") for folder in (RESULTS, tmp_path))
    pd.testing.assert_frame_equal(made, kept, rtol=1e-9)
    printed, protocol = capsys.readouterr().out, "experiments/across/README.md"
    lines = [*section(PAGE, "").splitlines(), *section(protocol, "").splitlines()]
    tables = [line for line in printed[printed.index("\n|  | small"):].splitlines() if line.startswith("|")]
    assert len(tables) >= 20 and [line for line in tables if line not in lines] == []
    rows = {(row["part"], row["name"]): row for row in kept.to_dict("records")}
    conv2d, longer, even = (rows[part, "conv2d"] for part in ("vit-rival", "equal-time", "equal-operations"))
    page_says(PAGE, "Which to use", f"{points(conv2d, '+')}, corrected p = {conv2d['p_holm']:.3f}", points(longer),
              points(rows["cifar100", "conv2d"], "+"), points(even),
              f"{100 * (conv2d['time_ratio'] - 1):.0f}% more time")
    page_says("README.md", "", f"{conv2d['difference']:.2f} points")
    significant = kept[(kept["p_holm"] < 0.05) & (kept["difference"] > 0)]
    assert significant[["part", "name"]].values.tolist() == [["vit-rival", "conv2d"]] and longer["p_holm"] < 0.001
    beside = kept[(kept["part"] == "cifar100") & kept["p"].notna()]  # convolutions: question 3
    page_says(PAGE, "Which to use", " to ".join(f"{x:+.2f}" for x in (beside["difference"].min(),
                                                                    beside["difference"].max())),
              f"{beside['p_holm'].min():.3f}")
    page_says(PAGE, "The verdict", *(
        points(rows["vit-alone", name], "+") for name in ("conv2d", "residual", "uniform")))
    for part in ("vit-rival", "cifar100"):
        found = kept[(kept["part"] == part) & kept["p"].notna()]["found_at_80_percent"]
        page_says(PAGE, CHANCES, f"{found.min():.2f} to {found.max():.2f}")
    equal = pd.read_csv(FACTORIAL / "effects.csv").query("name == 'EA - none equal time' and data == 'cifar100'")
    page_says(PAGE, "Which to use", points(equal.iloc[0]))


def test_token_convs_gain_its_cost_and_what_conv2d_is_worth():
    alone, rival = (by_variant(read_runs(RESULTS / f"{name}.csv")) for name in ("vit-alone", "vit-rival"))
    added, times = (rival["token_conv"] - alone["plain"]).dropna(), step_times()
    assert len(added) == 5
    top1, share = power.worth_in_updates()
    page_says(PAGE, "Which to use", f"{added.mean():+.2f}, five seeds",
              f"{times[RIVAL, 'plain'] / times[VIT, 'plain']:.3f}",
              f"{100 * share:.0f}% more updates", ", ".join(f"{x:.2f}" for x in top1[:2]) + f" and {top1[2]:.2f}%")


def test_what_the_seeds_could_have_found():
    """power.csv is what the spreads of the runs give, and the page says it."""
    kept = pd.read_csv(RESULTS / "power.csv").set_index("name")
    pd.testing.assert_frame_equal(power.achieved().set_index("name"), kept)
    page_says(PAGE, CHANCES, *(f"{row.power:.2f}" for row in kept.itertuples()), f"{power.PLANNED} points",
              *(f"{kept.overstated[name]:.1f}" for name in ("conv2d", "ea")))


def test_what_recall_asks_for_and_what_solves_it():
    symbols, wanted = recall(100_000, torch.Generator().manual_seed(0))
    frequent = 100 * (symbols[:, 1:16:2].mode(1).values == wanted).float().mean().item()
    rows = pd.read_csv(RESULTS / "recall.csv").groupby("variant")["result"]
    assert all(rows.min()[["token_conv", "conv2d", "mta", "refiner"]] == 100) and sum(rows.get_group("ea") > 99) == 3
    bits = pd.read_csv(RESULTS / "characters.csv").groupby("variant")["result"].mean()
    page_says(PAGE, "Two tasks without images", f"{frequent:.0f}%", "three of five", f"{bits['none']:.3f}",
              f"{bits['token_conv']:.3f}")


def test_the_measured_steps():
    rows = pd.read_csv(RESULTS / "benchmark.csv").set_index(["network", "kind"])["train_ratio"]
    for kind, ratio in rows["vit_small_patch16_224"].drop("plain").items():
        assert re.search(rf"^\| `{kind}` \|.*\| {ratio:.2f} \|$", section(PAGE, "Which there are"), re.M), kind


def test_the_second_verdict_is_planned_as_its_protocol_says():
    options = {}
    for part in SECOND.values():
        assert part.seeds == range(200, 208) and part.data == "cifar10"
        for variant in part.own:
            parsed = part.options(variant)
            length = float([value for key, value in zip(parsed, parsed[1:], strict=False) if key == "--epochs"][-1])
            options[part.name, variant] = length, part.keywords(variant)
    conv = "token_conv=paper"
    assert options == {
        ("second-updates", "token_conv"): (8, [conv]),
        ("second-updates", "xsa"): (8, [conv, "evolution=xsa"]),
        ("second-updates", "gated"): (8, [conv, "evolution=gated"]),
        ("second-xsa", AS_XSA): (12.61, [conv]), ("second-gated", AS_GATED): (8.84, [conv]),
        ("second-token-conv", AS_TOKEN_CONV): (8.72, []),
        ("second-long", LONG_TOKEN_CONV): (64, [conv]),
        ("second-long", LONG_CONV2D): (45, [conv, "evolution=conv2d"])}
    assert [part.tested for part in SECOND.values()] == [
        ("xsa", "gated"), ("xsa",), ("gated",), ("token_conv",), (LONG_CONV2D,)]
    assert PARTS.keys() | SECOND.keys() == RUNS.keys()

"""The verdict on attention across layers: its analysis, the pages that say its figures, and the script of its runs."""

import pandas as pd
import pytest
import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.sizes import count
from experiments import sweep
from experiments.across import analyse, power, run
from experiments.across.plan import (
    AS_TOKEN_CONV,
    EPOCHS,
    EVEN,
    LONG_CONV2D,
    LONG_TOKEN_CONV,
    NETWORKS,
    PARTS,
    RESULTS,
    RIVAL,
    SECOND,
    VIT,
    mechanism,
    step_times,
)
from experiments.across.sequences import recall
from experiments.evidence import read_runs, write_runs
from tests.experiments.pages import page_says, points, rows_of, section, span, table, top1_of

PAGE, WHICH, CHANCES = "docs/across-layers.md", "Which to use", "What these seeds could have found"
PROTOCOL = "experiments/across/README.md"


def test_runs_with_a_row_are_not_made_again_and_seeds_come_one_after_another(tmp_path, monkeypatch):
    made, part, out = [], PARTS["vit-alone"], tmp_path / "rows"
    kept = read_runs(RESULTS / "vit-alone.csv", variants=["plain", "uniform"]).iloc[[0, -1]]

    def train(command, folder, seed):
        made.append(folder.name)
        return {**kept.drop(columns="variant").iloc[0], "seed": seed, "top1": float(len(made))}

    monkeypatch.setenv("TIMM_FUSED_ATTN", "1")  # put back afterwards
    monkeypatch.setattr(sweep, "train", train)
    out.mkdir()
    write_runs(kept, out / "vit-alone.csv")
    command = [str(tmp_path / "runs"), "--cifar10", "ten", "-o", str(out)]
    assert run.main([*command, "--parts", "vit-alone"]) == 0
    assert made == [
        f"vit-alone,{variant},{seed}"
        for seed in part.seeds
        for variant in part.own
        if (variant, seed) not in set(zip(kept["variant"], kept["seed"], strict=True))
    ]
    rows = read_runs(out / "vit-alone.csv", variants=part.own)
    assert (
        len(rows) == len(part.own) * len(part.seeds)
        and rows["top1"].iloc[0] == kept["top1"].iloc[0]
    )
    run.main([*command, "--only", "vit-alone", "conv2d", "103"])
    assert made[-1] == "vit-alone,conv2d,103" and len(read_runs(out / "vit-alone.csv")) == len(rows)
    for wrong, message in (
        (["--only", "vit-dear", "conv2d", "100"], "vit-dear conv2d: .*vit-dear: refiner, mta"),
        (["--parts", "cifar100"], "cifar100 needs --cifar100 DIR"),
    ):
        with pytest.raises(UsageError, match=message):
            run.main([*command, *wrong])


def test_equal_operations_are_those_that_are_counted():
    network = NETWORKS[RIVAL]
    with torch.device("meta"):
        plain, conv2d = (
            count(timm.create_model(network.model, **network.keywords, **more), (3, 32, 32)).macs
            for more in ({}, mechanism(RIVAL, "conv2d"))
        )
    assert EPOCHS[EVEN] == round(8 * conv2d / plain, 2)


def test_the_pages_say_what_the_kept_runs_say(tmp_path, capsys):
    """verdict.csv is what the rows of runs give, and the pages have its tables and figures; a part that is not complete
    is left out."""
    assert analyse.main([str(RESULTS), "-o", str(tmp_path)]) == 0
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "verdict.csv"), table("across/verdict.csv"), rtol=1e-9
    )
    printed = capsys.readouterr().out
    lines = [*section(PAGE).splitlines(), *section(PROTOCOL).splitlines()]
    tables = [
        line
        for line in printed[printed.index("\n|  | small") :].splitlines()
        if line.startswith("|")
    ]
    assert len(tables) >= 20 and [line for line in tables if line not in lines] == []
    rows = table("across/verdict.csv").set_index(["part", "name"])
    conv2d, longer, even = (
        rows.loc[part, "conv2d"] for part in ("vit-rival", "equal-time", "equal-operations")
    )
    significant = rows[(rows["p_holm"] < 0.05) & (rows["difference"] > 0)]
    assert list(significant.index) == [("vit-rival", "conv2d"), ("second-token-conv", "token_conv")]
    assert longer["p_holm"] < 0.001
    equal_time = rows.loc["second-token-conv", "token_conv"]
    means = [
        top1_of(f"across/{part}.csv")[variant].mean()
        for part, variant in (
            ("second-updates", "token_conv"),
            ("second-token-conv", AS_TOKEN_CONV),
        )
    ]
    tested = rows[rows["p"].notna()]
    beside = tested.loc["cifar100"]  # convolutions: question 3
    equal = (
        table("../factorial/effects.csv")
        .query("name == 'EA - none equal time' and data == 'cifar100'")
        .iloc[0]
    )
    long = rows.loc["second-long", LONG_CONV2D]
    second = {
        name: [points(rows.loc[f"second-{part}", name], "+") for part in ("updates", name)]
        for name in ("xsa", "gated")
    }
    page_says(
        PROTOCOL,
        "",
        points(equal_time).replace(" ", " points ", 1),
        "{:.2f} against {:.2f}%".format(*means),
        *(f"{name} {found}" for name, each in second.items() for found in each),
        f"{points(long, '+')}, p {long['p']:.3f}",
        "{:.2f} against {:.2f}%".format(
            *top1_of("across/second-long.csv").mean()[[LONG_CONV2D, LONG_TOKEN_CONV]]
        ),
        long["found_at_80_percent"],
    )
    page_says(
        PAGE,
        WHICH,
        f"{points(conv2d, '+')}, corrected p = {conv2d['p_holm']:.3f}",
        points(longer),
        points(beside.loc["conv2d"], "+"),
        points(equal_time, "+").replace(" ", "** ", 1),
        points(long, "+"),
        *(found for each in second.values() for found in each),
        f"{100 * (conv2d['time_ratio'] - 1):.0f}% more time",
        " to ".join(f"{x:+.2f}" for x in beside["difference"].agg(["min", "max"])),
        f"{beside['p_holm'].min():.3f}",
        points(equal),
    )
    page_says(
        "README.md",
        "",
        f"{conv2d['difference']:.2f} points",
        f"{-longer['difference']:.2f} behind",
        f"({-long['difference']:.2f} where",
        points(beside.loc["conv2d"]),
        f"{equal_time['difference']:.2f} points",
    )
    page_says("docs/experiments.md", "", points(equal_time))
    page_says(
        PAGE,
        "The verdict",
        points(even),
        *(points(rows.loc["vit-alone", name], "+") for name in ("conv2d", "residual", "uniform")),
    )
    page_says(
        PAGE,
        CHANCES,
        *(span(tested.loc[part, "found_at_80_percent"]) for part in ("vit-rival", "cifar100")),
    )


def test_what_the_seeds_could_have_found_and_what_mechanisms_cost():
    """power.csv is what the spreads of the runs give; token_conv's gain and cost, what conv2d is worth, the steps."""
    of = table("across/power.csv").set_index("name")
    pd.testing.assert_frame_equal(power.achieved().set_index("name"), of)
    page_says(
        PAGE,
        CHANCES,
        *of["power"],
        f"{power.PLANNED} points",
        *(f"{of.overstated[name]:.1f}" for name in ("conv2d", "ea")),
    )
    added = (
        top1_of("across/vit-rival.csv")["token_conv"] - top1_of("across/vit-alone.csv")["plain"]
    ).dropna()
    (first, second, third), share = power.worth_in_updates()
    times = step_times()
    assert len(added) == 5
    page_says(
        PAGE,
        WHICH,
        f"{added.mean():+.2f}, five seeds",
        f"{times[RIVAL, 'plain'] / times[VIT, 'plain']:.3f}",
        f"{100 * share:.0f}% more updates",
        f"{first:.2f}, {second:.2f} and {third:.2f}%",
    )
    ratios = table("across/benchmark.csv").set_index(["network", "kind"])["train_ratio"][
        "vit_small_patch16_224"
    ]
    for kind, ratio in ratios.drop("plain").items():
        assert rows_of(PAGE, rf"\| `{kind}` \|.*\| {ratio:.2f} \|", "Which there are"), kind


def test_what_recall_asks_for_and_what_solves_it():
    symbols, wanted = recall(100_000, torch.Generator().manual_seed(0))
    frequent = 100 * (symbols[:, 1:16:2].mode(1).values == wanted).float().mean().item()
    rows = table("across/recall.csv").groupby("variant")["result"]
    assert (
        all(rows.min()[["token_conv", "conv2d", "mta", "refiner"]] == 100)
        and sum(rows.get_group("ea") > 99) == 3
    )
    bits = table("across/characters.csv").groupby("variant")["result"].mean()
    page_says(
        PAGE,
        "Two tasks without images",
        f"{frequent:.0f}%",
        "three of five",
        f"{bits['none']:.3f}",
        f"{bits['token_conv']:.3f}",
    )


def test_the_row_of_each_part_of_the_second_verdict_has_how_long_its_runs_take():
    for part in SECOND.values():
        (row,) = rows_of(PROTOCOL, rf"\| \d\..*{part.name}.*")
        for variant in part.own:
            assert f" {EPOCHS.get(variant, 8)} " in row, (part.name, variant)

"""The page of published and measured figures: docs/results.md is what the command prints, and its commands are ones."""
import os
import re
import shlex
from pathlib import Path

import pytest
import timm

from ea_vision.base.errors import UsageError
from ea_vision.base.files import write_json
from ea_vision.detection.train import DetectionConfig
from ea_vision.engine.config import make_parser, parse, resolve
from ea_vision.engine.run_folder import METRICS, RESULTS, write_config
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.engine.train_imagenet import ImageNetConfig
from ea_vision.measure import reproduce
from ea_vision.measure.counts import Counts
from ea_vision.models import printed_tables, published_figures, published_tables

ROOT = Path(__file__).resolve().parents[2]
ROWS = [(table, row, data) for table in published_tables().values() for row in table.rows for data in row.recipes]
SMALL = ("wide-resnet", "conv-transformer", "attention-cost", "detection", "probe")
MEASURED = {"params M", "GFLOPs"}


def documented(title: str) -> str:
    """A section of docs/results.md, its heading included."""
    [found] = [part for part in (ROOT / "docs" / "results.md").read_text().split("\n## ") if part.startswith(title)]
    return f"## {found.rstrip()}"


def unmeasured(text: str) -> list[list[str]]:
    """Lines as cells, without those that are counted on networks."""
    lines, heading = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        heading = cells if MEASURED & set(cells) else heading if line.startswith("|") else []
        if not set(line) <= set("|- "):
            lines.append([cell for index, cell in enumerate(cells)
                          if not heading or cells is heading or heading[index] not in MEASURED])
    return lines


@pytest.mark.parametrize("name", list(published_tables()))
def test_the_page_of_results_is_what_the_command_prints(name, monkeypatch):
    """Of large networks all but what is counted, which `make test-all` counts, too."""
    table, counts_all = published_tables()[name], name in SMALL or os.environ.get("EA_VISION_TEST_ALL") == "1"
    if not counts_all:
        monkeypatch.setattr(reproduce, "_counted", lambda *of: Counts(1, 1, 1, 1, ()))
    printed, shown = reproduce.section(table, table.rows, reproduce.shipped_runs()), documented(table.title)
    hint = "run: ea-vision reproduce > docs/results.md"
    assert (printed == shown if counts_all else unmeasured(printed) == unmeasured(shown)), hint


def test_the_page_has_its_text_and_every_table():
    text = (ROOT / "docs" / "results.md").read_text()
    assert text.startswith(reproduce.TEXT) and text.endswith(reproduce.MISSING + "\n")
    shown = [table for table in printed_tables().values() if table.name not in reproduce.BY_NAME]
    assert all(reproduce.printed(table) in text for table in shown)
    assert text.count("\n## ") == len(published_tables()) + len(shown) + 1
    assert len(text.split()) <= 2800


def test_commands_train_the_row_s_network_as_long_as_the_page_says():
    trainers = {"train-cifar": CifarConfig, "train-imagenet": ImageNetConfig, "train-detection": DetectionConfig}
    parsers = {cls: make_parser(cls, "", "") for cls in trainers.values()}
    for _, row, data in ROWS:
        words = shlex.split(f"{reproduce.trainer(row, data)} {reproduce.options(row, data)}")
        [start] = [index for index, word in enumerate(words) if word in trainers]
        assert words[:start] in (["ea-vision"], ["torchrun", "--nproc-per-node", "8", "-m", "ea_vision"])
        cls = trainers[words[start]]
        config, _ = resolve(cls, parse(parsers[cls], words[start + 1:]))
        assert config.model == row.model and row.kwargs.items() <= config.model_kwargs.items(), words
        if data.startswith("CIFAR"):
            assert config.dataset == data.lower().replace("-", "")


def test_cost_is_three_forward_passes_an_image():
    [row] = [row for row in published_tables()["imagenet"].rows if row.model == "resnet50"]
    macs = 4.09e9  # of ResNet-50, as is well known
    epochs, eflop = reproduce.cost(row, "ImageNet")
    assert epochs == 100 and eflop == pytest.approx(3 * 2 * macs * 1_281_167 * 100 / 1e18, rel=1e-3)
    [row] = [row for row in published_tables()["conv-transformer"].rows if row.model == "cnn_cifar"]
    macs = reproduce.counted(row, "CIFAR-10").macs
    assert reproduce.cost(row, "CIFAR-10") == (630, pytest.approx(6 * macs * 45_000 * 630 / 1e18))  # 5,000 held out


def test_the_file_of_figures_is_whole():
    for table, row, _ in ROWS:
        assert timm.is_model(row.model) and row.published.source and table.counting in ("paper", "profiler")
    names = [(table.name, row.label) for table in published_tables().values() for row in table.rows]
    assert len(set(names)) == len(names) > 70
    # a network's own figures are those of the first table that has it: the EA paper's, not the AA paper's
    assert published_figures("aa_resnet50").top1 == {"ImageNet": 77.70}
    assert published_figures("cnn_cifar").top1 == {"CIFAR-10": 95.90, "CIFAR-100": 78.17}
    assert published_figures("pa_conv_transformer_cifar").gflops == 1.14
    assert published_figures("ea_conv_transformer_cifar") is None and published_figures("resnet18_cifar") is None


def write_run(folder: Path, top1: float, *, split: str = "test", train: int = 50_000, complete: bool = True, **kwargs):
    """The files of a run of conv_transformer_cifar by the PA paper's recipe."""
    folder.mkdir(parents=True)
    config = {"model": "conv_transformer_cifar", "recipe": "pa_cifar10", "img_size": 32, "seed": 0}
    write_config(folder, config, {
        "model_kwargs": {"num_classes": 10, "in_chans": 3, "img_size": 32, "conv_drop_rate": 0.2, **kwargs},
        "classes": list("abcdefghij"), "train_images": train, "eval_images": 5_000 if split == "held_out" else 10_000,
        "eval_split": split, "data_fingerprint": "d"})
    (folder / METRICS).write_text("epoch,step,lr,train_loss,top1,top5,images_per_s,seconds\n"
                                  f"630,9,0.1,2.0,{top1},99.0,10,1.25\n")
    if complete:
        figures = {"epoch": 630, "top1": top1, "top5": 99.0}
        write_json(folder / RESULTS, {"epochs": 630, "eval_split": split, "test_last": figures, "test_best": figures})


def test_accuracies_of_your_own_runs(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a", 95.0)
    write_run(tmp_path / "runs" / "deeper" / "b", 96.0, split="held_out", train=45_000)
    write_run(tmp_path / "runs" / "narrow", 80.0, widths=[8, 8, 8, 8])
    write_run(tmp_path / "runs" / "few images", 70.0, train=1_000)
    write_run(tmp_path / "runs" / "unfinished", 0.0, complete=False)
    write_run(tmp_path / "runs" / "damaged", 900.0)
    (tmp_path / "runs" / "other program").mkdir()
    (tmp_path / "runs" / "other program" / "config.yaml").write_text("- a: [1, 2]\n")
    (tmp_path / "runs" / "other program" / RESULTS).write_text("[]")
    assert reproduce.main(["conv_transformer_cifar", "--runs", str(tmp_path / "runs")]) == 0
    out, err = capsys.readouterr()
    assert err.count("passed over: ") == len(err.splitlines()) == 2 and "top1 cannot be 900" in err
    rows = [line for line in out.splitlines() if line.startswith("| conv_transformer_cifar")]
    assert len(rows) == 2 and "| not run" in rows[1]
    assert ("89.57 (10 epochs of `fast_sgd`); 93.48 (10 epochs of `fast`); 95.50 (630 epochs of `pa_cifar10`, 2 runs)"
            in rows[0])
    assert out.endswith("# conv_transformer_cifar, CIFAR-100: 620 epochs, 0.08 EFLOP\nea-vision train-cifar --dataset "
                        "cifar100 --download --device cuda --recipe pa_cifar100 --model conv_transformer_cifar\n")
    with pytest.raises(UsageError, match="--runs must be a folder"):
        reproduce.main(["--runs", str(tmp_path / "nowhere")])


def test_a_wrong_name_is_one_line():
    with pytest.raises(UsageError, match="called 'ea_aa_resnet5'; did you mean .*ea_aa_resnet50"):
        reproduce.main(["ea_aa_resnet5"])


def shown(text: str) -> list[str]:
    """The figures of a paper's table as PAPERS.md writes them."""
    return re.findall(r"\d+(?:\.\d+)?(?:/\d+\.\d+)?", text)


def test_every_published_figure_is_in_the_papers_tables(shared):
    """Where the transcription of the papers' tables is at hand: what is typed as theirs stands in it."""
    text = (shared / "PAPERS.md").read_text()
    pa, ea = text.split("## EA paper")
    tables = {f"{name} paper, table {number}": line for name, part in (("PA", pa), ("EA", ea))
              for number, line in re.findall(r"^Table ([\d/]+)[,:](.*?)(?=^Table |\Z)", part, re.M | re.S)}
    tables["EA paper, tables 8 and 11"] = tables.pop("EA paper, table 8/11")
    checked = 0
    for table in published_tables().values():
        for row in table.rows:
            line = tables.get(row.published.source)
            if line is None:
                assert row.published.source.startswith("AA paper"), row.published.source
                continue
            figures = row.published
            typed = [*figures.top1.values(), *figures.top5.values(), *row.figures.get("layers", {}).values()]
            typed += [value for value in (figures.params_m, figures.gflops) if value is not None]
            assert set(map(float, typed)) <= set(map(float, re.findall(r"\d+(?:\.\d+)?", line))), row
            if figures.top1 and table.name in ("imagenet", "evolution"):  # top-1 and top-5 stand together
                together = f"{figures.top1['ImageNet']:.2f}" + "".join(f" {x:.2f}" for x in figures.top5.values())
                assert together in line, together
            checked += len(typed)
    for table in printed_tables().values():
        line = tables[table.source]
        for cells in table.rows.values():
            typed = shown(" ".join(f"{cell:g}" if isinstance(cell, float) else cell for cell in cells))
            known = {figure if "/" in figure else f"{float(figure):g}" for figure in shown(line)}
            assert set(typed) <= known, (table.name, cells)
            checked += len(cells)
    assert checked > 180


def test_published_positions_and_shares_are_built_as_the_paper_says():
    """Position tables and shares change the sizes as published, and positions that learn nothing add nothing."""
    sizes = {row.label: reproduce.counted(row, "ImageNet").params for row in published_tables()["position"].rows
             if row.model == "aa_resnet50"}
    none, sine, coord, relative = (sizes[f"aa_resnet50, positions {kind}"]
                                   for kind in ("none", "sine", "coord", "relative"))
    assert none == sine < relative and none < coord
    for name in ("share", "position"):
        for row in published_tables()[name].rows:
            if row.published.params_m and (row.model == "aa_resnet50" or os.environ.get("EA_VISION_TEST_ALL") == "1"):
                counts = reproduce.counted(row, "ImageNet")
                assert counts.params / 1e6 == pytest.approx(row.published.params_m, abs=0.06)
                assert counts.flops_profiler / 1e9 == pytest.approx(row.published.gflops, rel=0.02)

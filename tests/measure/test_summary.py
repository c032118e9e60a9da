"""The summary's arithmetic against counts made by hand, and the published figures."""
import csv
import io

import pytest
import timm
import torch

from ea_vision.base.errors import exit_code
from ea_vision.measure.counts import count
from ea_vision.measure.summary import main, summarise
from ea_vision.models import published_figures, published_names


def test_counts_of_an_augmented_resnet():
    plain, aa, ea = summarise("resnet34"), summarise("aa_resnet34"), summarise("ea_aa_resnet34")
    assert (plain.attention_layers, plain.maps) == (0, "")
    assert (aa.attention_layers, aa.maps) == (26, "20 x 8 x (14x14) + 6 x 8 x (7x7)")
    # an evolution convolution: 8 x 8 x 9 multiply-adds a pixel of the N x N map, 19 + 5 layers have one
    extra = 8 * 8 * 9 * (19 * 196**2 + 5 * 49**2)
    assert ea.gmacs - aa.gmacs == pytest.approx(extra / 1e9, rel=1e-6)


@pytest.mark.parametrize("name", [
    "resnet34", "aa_resnet34", "ea_aa_resnet34", "resnet50", "aa_resnet50", "ea_aa_resnet50"])
def test_arithmetic_is_the_papers_within_two_percent(name):
    row = summarise(name)
    assert row.gflops_paper == pytest.approx(published_figures(name).gflops, rel=0.02)
    assert row.gflops_profiler == pytest.approx(published_figures(name).gflops, rel=0.02)
    assert row.params_m == pytest.approx(published_figures(name).params_m, abs=0.06)


def test_the_profilers_counting_of_whole_networks():
    """Totals worked out beside the AA paper's, which prints 8.3 for its AA-ResNet-50; EA adds its map convolutions."""
    aa, ea = (count(timm.create_model(name), (3, 224, 224)) for name in ("aa_resnet50", "ea_aa_resnet50"))
    assert round(aa.flops_profiler / 1e9, 2) == 8.31
    evolving = [branch for branch in ea.branches if branch.evolves]
    assert len(evolving) == 11
    assert ea.flops_profiler - aa.flops_profiler == 2 * 8 * 8 * 9 * (9 * 196**2 + 2 * 49**2)
    plain = count(timm.create_model("cnn_cifar"), (3, 32, 32))
    assert plain.flops_profiler == plain.flops_paper == 2 * plain.macs and not plain.branches


@pytest.mark.parametrize("share, published, exact", [(0.25, 7.9, 7.87), (0.5, 7.3, 7.26), (0.75, 6.8, 6.73),
                                                    (1.0, 6.3, 6.28)])
def test_the_profilers_counting_of_the_aa_papers_shares_of_attention(share, published, exact):
    counts = count(timm.create_model("aa_resnet50", qk_ratio=share, v_ratio=share, min_head_qk=20), (3, 224, 224))
    assert round(counts.flops_profiler / 1e9, 2) == exact == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("name", [name for name in published_names() if published_figures(name).gflops
                                  and ("mnasnet" in name or "wrn" in name)])
def test_the_profilers_counting_of_the_aa_papers_other_families(name):
    assert summarise(name).gflops_profiler == pytest.approx(published_figures(name).gflops, rel=0.02)


def test_branches_are_the_aa_papers_table_9(capsys):
    """Published: 600 KB, 43k, 22M; 600 KB, 90k, 40M; 37.5 KB, 190k, 19M; in all 6 MB in training, 600 KB in inference,
    1.3M, 390M."""
    branches = count(timm.create_model("aa_resnet50"), (3, 224, 224)).branches
    found = [(b.layer, b.map_bytes, b.params, b.flops_profiler) for b in branches]
    by_hand = []
    for stage, blocks, N, sides, planes, dim_v in ((2, 4, 196, 28, 128, 8), (3, 6, 196, 28, 256, 24),
                                                   (4, 3, 49, 14, 512, 48)):
        weights = planes * (320 + dim_v) + dim_v**2  # 160 for queries, 160 for keys; without biases
        params = weights + (320 + 2 * dim_v) + (2 * sides - 2) * 20
        flops = 2 * N * weights + 2 * N * 160 * (2 * sides - 2) + 6 * 8 * N**2
        by_hand += [(f"layer{stage}.{block}.conv2", 2 * 8 * N**2, params, flops) for block in range(blocks)]
    assert found == by_hand
    first = [by_hand[index] for index in (0, 4, 10)]
    assert [size / 1024 for _, size, _, _ in first] == [600.25, 600.25, 37.515625]
    assert [params for _, _, params, _ in first] == [43_464, 90_088, 191_656]
    assert [round(flops / 1e6, 1) for _, _, _, flops in first] == [21.7, 40.0, 19.2]

    assert main(["aa_resnet50", "--layers"]) == 0
    name, heading, _, *rows, total = capsys.readouterr().out.splitlines()
    assert name == "aa_resnet50" and len({len(line) for line in (heading, *rows)}) == 1
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["4", "layer2.0.conv2", "8 x (14x14)", "600.25", "43,464", "21.7", ""],
        ["6", "layer3.0.conv2", "8 x (14x14)", "600.25", "90,088", "40.0", ""],
        ["3", "layer4.0.conv2", "8 x (7x7)", "37.52", "191,656", "19.2", ""]]
    assert total == ("maps: 5.97 MiB in training, 600.25 KiB in inference; 1,289,352 parameters; 384.4 MFLOPs")


def test_branches_that_evolve_have_the_convolution_and_a_second_map(capsys):
    assert main(["cnn_cifar", "ea_conv_transformer_cifar", "--layers", "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["feat_size"], row["evolves"]) for row in rows] == [
        (size, evolves) for size in ("8x8", "4x4") for evolves in ("False", "True", "True")]
    plain, evolving = ({key: int(row[key]) for key in ("map_bytes", "params", "flops_profiler")} for row in rows[:2])
    assert plain["map_bytes"] == evolving["map_bytes"] == 2 * 4 * 64**2
    assert evolving["params"] - plain["params"] == 4 * 4 * 9 + 4
    assert evolving["flops_profiler"] - plain["flops_profiler"] == 2 * 4 * 4 * 9 * 64**2
    assert main(["ea_conv_transformer_cifar", "--layers"]) == 0
    assert f"{2 * 2 * 4 * 64**2 / 1024:.2f} KiB in inference" in capsys.readouterr().out


def test_branches_of_a_vision_transformer(capsys):
    """By hand: K 3, T 197, C 192; weights of qkv and projection, and of 11 convolutions over maps."""
    assert main(["ea_vit_tiny_patch16_224", "--layers", "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    weights, gates = 4 * 192**2 + 4 * 192, 2
    assert [(row["layer"], row["evolves"], row["feat_size"]) for row in rows] == [
        (f"blocks.{i}.attn", str(i > 0), "1x197") for i in range(12)]
    assert [int(row["params"]) for row in rows] == [weights] + 11 * [weights + 9 * 3**2 + 3 + gates]
    assert {int(row["map_bytes"]) for row in rows} == {2 * 3 * 197**2}
    flops = [int(row["flops_profiler"]) for row in rows]
    assert flops[0] == 2 * 197 * 4 * 192**2 + 6 * 3 * 197**2 and flops[1] - flops[0] == 2 * 9 * 3**2 * 197**2


def test_fused_attention_of_timm_is_counted_on_every_device():
    """By hand: 5 blocks of 64 tokens 64 wide; queries with keys and maps with values."""
    products = 5 * 2 * 64 * 64 * 64
    on_cpu = count(timm.create_model("vit_mini_patch4_32"), (3, 32, 32))
    with torch.device("meta"):
        on_meta = count(timm.create_model("vit_mini_patch4_32"), (3, 32, 32))
    assert on_cpu.attention_macs == on_meta.attention_macs == products and on_cpu.macs == on_meta.macs


def test_layers_of_a_network_without_attention_is_one_line(capsys):
    assert exit_code(lambda: main(["cnn_cifar", "--layers"])) == 2
    assert capsys.readouterr().err == "error: --layers needs a network with this package's attention, got cnn_cifar\n"


def test_table_and_csv(tmp_path, capsys):
    path = tmp_path / "summary.csv"
    assert main(["cnn_cifar", "ea_conv_transformer_cifar", "--csv", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["model"] for row in rows] == ["cnn_cifar", "ea_conv_transformer_cifar"]
    assert float(rows[0]["params_m"]) == pytest.approx(5.36, abs=0.01) and rows[1]["published_params_m"] == ""


def test_unknown_model_is_one_line(capsys):
    assert exit_code(lambda: main(["ea_resnet50"])) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "ea_aa_resnet50" in err

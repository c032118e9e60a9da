"""`ea-vision models`: names, weights, and arithmetic against counts made by hand and the published figures."""

import csv
import io

import pytest
import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.layers import attention_layers
from ea_vision.models import list_networks
from ea_vision.sizes import count, list_models, main, names_of, sizes_of
from experiments.published import figures, tables


def csv_of(*argv, capsys) -> list[dict[str, str]]:
    assert main([*argv, "--csv", "-"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_every_network_once_with_what_it_is(capsys):
    assert main([]) == 0
    names = []
    for line in capsys.readouterr().out.splitlines()[2:]:
        _, name, _, _, about, _ = (cell.strip() for cell in line.split("|"))
        names.append(name)
        assert about
    assert names == list_networks()


def test_patterns_and_parts_of_names():
    assert names_of(["ea_aa_resnet*"]) == [
        f"ea_aa_resnet{size}" for size in ("34", "50", "101", "152", "34_050")
    ]
    assert names_of(["_resnet50", "resnet50", "resnet50"]) == [
        f"{kind}_resnet50" for kind in ("aa", "pa_aa", "ea_aa", "csan")
    ] + ["resnet50"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["ea_aa_resnet5O"], "fits 'ea_aa_resnet5O'; did you mean ea_aa_resnet50"),
        (["ea_aa_mnasnet_140", "--weights"], "none of the 1 networks has weights"),
        (["cnn_cifar", "--layers"], "none of the 1 networks has our attention"),
    ],
)
def test_bad_input(argv, message):
    with pytest.raises(UsageError, match=message):
        main(argv)


def test_weights_are_names_that_timm_creates():
    rows = list_models(names_of(["conv_transformer"]), weights=True)
    assert rows and all(row["weights"] == "comes with ea_vision" for row in rows)
    assert all(timm.models.is_model_pretrained(row["model"]) for row in rows)
    assert all(
        row["weights"].startswith("hub: timm/")
        for row in list_models(names_of(["ea_deit_"]), weights=True)
    )


def test_sizes_of_an_augmented_resnet(tmp_path, capsys):
    path = tmp_path / "sizes.csv"
    assert main(["--sizes", "resnet34", "aa_resnet34", "--csv", str(path)]) == 0
    assert "| aa_resnet34 | 224x224 | 20.69" in " ".join(capsys.readouterr().out.split())
    assert [(row["model"], row["layers"], row["maps"]) for row in csv.DictReader(path.open())] == [
        ("resnet34", "0", ""),
        ("aa_resnet34", "26", "20 x 8 x (14x14) + 6 x 8 x (7x7)"),
    ]


def published():
    """Return the papers' rows of networks that classify."""
    rows = []
    for table in ("imagenet", "mnasnet", "wide-resnet"):
        rows += tables()[table]["rows"]
    return rows


@pytest.mark.parametrize(
    "row",
    [row for row in published() if not row["model"].endswith(("101", "152"))],
    ids=lambda row: row["model"],
)
def test_arithmetic_is_the_papers_within_two_percent(row):
    """The EA paper's ResNets in both countings; the AA paper's other families in that of the profiler."""
    found = sizes_of(row["model"])
    assert found["profiler"] == pytest.approx(row["gflops"], rel=0.02)
    assert found["params M"] == pytest.approx(figures(row["model"])["params_m"], abs=0.15)
    if "resnet" in row["model"]:
        assert found["GFLOPs"] == pytest.approx(row["gflops"], rel=0.02)


def test_the_profilers_counting_of_whole_networks():
    """Totals worked out beside the AA paper's, which prints 8.3 for its AA-ResNet-50; EA adds its map convolutions."""
    with torch.device("meta"):
        aa, ea = (
            count(timm.create_model(name), (3, 224, 224))
            for name in ("aa_resnet50", "ea_aa_resnet50")
        )
    assert (
        round(aa.flops_profiler / 1e9, 2) == 8.31
        and sum(branch.evolves for branch in ea.branches) == 11
    )
    # an evolution convolution: 8 x 8 x 9 multiply-adds a pixel of the N x N map
    added = 8 * 8 * 9 * (9 * 196**2 + 2 * 49**2)
    assert (ea.flops_profiler - aa.flops_profiler, ea.macs - aa.macs) == (2 * added, added)
    plain = count(timm.create_model("cnn_cifar"), (3, 32, 32))
    assert plain.flops_profiler == plain.flops_paper == 2 * plain.macs and not plain.branches


def test_branches_are_the_aa_papers_table_9():
    """Published: 600 KB, 43k, 22M; 600 KB, 90k, 40M; 37.5 KB, 190k, 19M; in all 6 MB in training, 600 KB in inference,
    1.3M, 390M."""
    with torch.device("meta"):
        branches = count(timm.create_model("aa_resnet50"), (3, 224, 224)).branches
    by_hand = []
    for stage, blocks, N, sides, planes, dim_v in (
        (2, 4, 196, 28, 128, 8),
        (3, 6, 196, 28, 256, 24),
        (4, 3, 49, 14, 512, 48),
    ):
        weights = planes * (320 + dim_v) + dim_v**2  # 160 for queries, 160 for keys; without biases
        params = weights + (320 + 2 * dim_v) + (2 * sides - 2) * 20
        flops = 2 * N * weights + 2 * N * 160 * (2 * sides - 2) + 6 * 8 * N**2
        by_hand += [
            (f"layer{stage}.{block}.conv2", 2 * 8 * N**2, params, flops) for block in range(blocks)
        ]
    assert [(b.layer, b.map_bytes, b.params, b.flops_profiler) for b in branches] == by_hand
    assert [
        (b.map_bytes / 1024, b.params, b.flops_profiler)
        for b in (branches[0], branches[4], branches[10])
    ] == [
        (600.25, 43464, pytest.approx(21.7e6, rel=2e-3)),
        (600.25, 90088, pytest.approx(40.0e6, rel=2e-3)),
        (pytest.approx(37.52, abs=0.01), 191656, pytest.approx(19.2e6, rel=2e-3)),
    ]
    maps, params, flops = map(sum, zip(*(row[1:] for row in by_hand), strict=True))
    assert (round(maps / 2**20, 2), params, round(flops / 1e6, 1)) == (5.97, 1289352, 384.4)


def test_branches_that_evolve_have_the_convolution(capsys):
    rows = csv_of("cnn_cifar", "ea_conv_transformer_cifar", "--layers", capsys=capsys)
    assert [row["feat_size"] for row in rows] == ["8x8"] * 3 + ["4x4"] * 3
    assert [row["evolves"] for row in rows] == ["False", "True", "True"] * 2
    plain, evolving = rows[:2]
    added = {key: int(evolving[key]) - int(plain[key]) for key in ("params", "flops_profiler")}
    assert int(plain["map_bytes"]) == int(evolving["map_bytes"]) == 2 * 4 * 64**2
    assert added["params"] == 4 * 4 * 9 + 4
    assert added["flops_profiler"] == 2 * 4 * 4 * 9 * 64**2


def test_branches_of_a_vision_transformer(capsys):
    """By hand: K 3, T 197, C 192; weights of qkv and projection, and of 11 convolutions over maps."""
    rows = csv_of("ea_vit_tiny_patch16_224", "--layers", capsys=capsys)
    gates = 2
    weights = 4 * 192**2 + 4 * 192
    evolving = weights + 9 * 3**2 + 3 + gates
    assert [row["layer"] for row in rows] == [f"blocks.{i}.attn" for i in range(12)]
    assert [row["evolves"] for row in rows] == ["False"] + 11 * ["True"]
    assert [row["feat_size"] for row in rows] == 12 * ["1x197"]
    assert [int(row["params"]) for row in rows] == [weights] + 11 * [evolving]
    flops = [int(row["flops_profiler"]) for row in rows]
    assert (
        flops[0] == 2 * 197 * 4 * 192**2 + 6 * 3 * 197**2
        and flops[1] - flops[0] == 2 * 9 * 3**2 * 197**2
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_attention_of_timm_is_counted_on_every_device(device):
    """By hand: 5 blocks of 64 tokens 64 wide, queries with keys and maps with values; patches of 48 numbers."""
    with torch.device(device):
        counts = count(timm.create_model("vit_mini_patch4_32"), (3, 32, 32))
    products = 5 * 2 * 64 * 64 * 64
    assert (counts.attention_macs, counts.macs) == (
        products,
        products + 5 * 64 * 12 * 64**2 + 64 * 48 * 64 + 640,
    )


@pytest.mark.parametrize("num_heads", [4, 16])
def test_products_with_positions_are_counted_in_heads_of_any_width(num_heads):
    with torch.device("meta"):
        model = timm.create_model(
            "conv_transformer_cifar", widths=(16, 16, 16, 16), num_heads=num_heads
        )
    expected = 0
    for layer in attention_layers(model):
        (H, W), N = layer.feat_size, layer.feat_size[0] * layer.feat_size[1]
        expected += N**2 * (layer.dim_qk + layer.dim_v) + N * (H + W) * layer.dim_qk
    assert count(model, (3, 32, 32)).attention_macs == expected

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
from tests.recorder.networks import torchvision_vit


def csv_of(*argv, capsys):
    assert main([*argv, "--csv", "-"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_every_network_once_with_what_it_is(capsys):
    assert main([]) == 0
    names = []
    for line in capsys.readouterr().out.splitlines()[2:]:
        cells = line.split("|")
        names.append(cells[1].strip())
        assert cells[4].strip()
    assert names == list_networks()


def test_patterns_and_parts_of_names():
    sizes = ("34", "50", "101", "152", "34_050")
    assert names_of(["ea_aa_resnet*"]) == [f"ea_aa_resnet{size}" for size in sizes]
    kinds = ("aa_", "pa_aa_", "ea_aa_", "csan_", "")
    names = names_of(["_resnet50", "resnet50", "resnet50"])
    assert names == [f"{kind}resnet50" for kind in kinds]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["ea_aa_resnet5O"], "fits 'ea_aa_resnet5O'; did you mean ea_aa_resnet50"),
        (["ea_aa_mnasnet_140", "--weights"], "none of the 1 networks has weights"),
        (["cnn_cifar", "--layers"], "none of the 1 networks has our attention"),
        (["."], "the list is of networks by name; . needs --sizes or --layers"),
        (["hf-hub:a/b"], "the list is of networks by name; hf-hub:a/b needs"),
        (["resnet50.a1_in2k"], "resnet50 has no weights 'a1_in2k'; did you mean resnet50.a1"),
        (["cnn_cifar", "--csv", "."], "the output must be a file"),
    ],
)
def test_bad_input(argv, message):
    with pytest.raises(UsageError, match=message):
        main(argv)


def test_weights_are_names_that_timm_creates():
    ours = list_models(names_of(["conv_transformer"]), weights=True)
    assert ours
    for row in ours:
        assert row["weights"] == "comes with ea_vision"
        assert timm.models.is_model_pretrained(row["model"])
    for row in list_models(names_of(["ea_deit_"]), weights=True):
        assert row["weights"].startswith("hub: timm/")


def test_weights_that_are_shipped_come_first_and_plain_networks_say_how_they_are_used():
    rows = list_models(names_of(["aa_resnet"]), weights=True)
    shipped = [row["weights"] == "comes with ea_vision" for row in rows]
    assert shipped[0]
    assert shipped == sorted(shipped, reverse=True)
    [row] = [row for row in rows if row["model"] == "ea_aa_resnet50.a1_in1k"]
    assert row["what it is"].startswith('begins as timm\'s resnet50.a1_in1k with fusion="add"')


def test_weights_by_their_name():
    [row] = list_models(names_of(["resnet50.a2_in1k"]), weights=True)
    assert row["model"] == "resnet50.a2_in1k"
    assert row["weights"].startswith("hub: timm/")
    [row] = list_models(["resnet50.a2_in1k"])
    assert row["weights"] == "a2_in1k"


def test_sizes_of_an_augmented_resnet(tmp_path, capsys):
    path = tmp_path / "sizes.csv"
    assert main(["--sizes", "resnet34", "aa_resnet34", "--csv", str(path)]) == 0
    words = capsys.readouterr().out.split()
    assert "| aa_resnet34 | 224x224 | 20.69" in " ".join(words)
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["resnet34", "aa_resnet34"]
    assert [row["layers"] for row in rows] == ["0", "26"]
    assert [row["maps"] for row in rows] == ["", "20 x 8 x (14x14) + 6 x 8 x (7x7)"]


def published():
    """Return the papers' rows of networks that classify, without the deepest."""
    rows = []
    for table in ("imagenet", "mnasnet", "wide-resnet"):
        rows += tables()[table]["rows"]
    return [row for row in rows if not row["model"].endswith(("101", "152"))]


@pytest.mark.parametrize("row", published(), ids=lambda row: row["model"])
def test_arithmetic_is_the_papers_within_two_percent(row):
    """The EA paper's ResNets by both ways of counting; the AA paper's other families by the profiler's."""
    found = sizes_of(row["model"])
    assert found["profiler"] == pytest.approx(row["gflops"], rel=0.02)
    assert found["params M"] == pytest.approx(figures(row["model"])["params_m"], abs=0.15)
    if "resnet" in row["model"]:
        assert found["GFLOPs"] == pytest.approx(row["gflops"], rel=0.02)


def count_of(name, side=224, device="meta", **options):
    with torch.device(device):
        return count(timm.create_model(name, **options), (3, side, side))


def test_the_profilers_counting_of_whole_networks():
    """Totals worked out beside the AA paper's, which prints 8.3 for its AA-ResNet-50; EA adds its map convolutions."""
    aa = count_of("aa_resnet50")
    ea = count_of("ea_aa_resnet50")
    assert round(aa.flops_profiler / 1e9, 2) == 8.31
    assert sum(branch.evolves for branch in ea.branches) == 11
    # an evolution convolution: 8 x 8 x 9 multiply-adds a pixel of the N x N map
    added = 8 * 8 * 9 * (9 * 196**2 + 2 * 49**2)
    assert ea.flops_profiler - aa.flops_profiler == 2 * added
    assert ea.macs - aa.macs == added
    plain = count_of("cnn_cifar", 32)
    assert plain.flops_profiler == plain.flops_paper == 2 * plain.macs
    assert not plain.branches


def test_branches_are_the_aa_papers_table_9():
    """Published: 600 KB, 43k, 22M; 600 KB, 90k, 40M; 37.5 KB, 190k, 19M; in all 6 MB in training, 600 KB in inference,
    1.3M, 390M."""
    by_hand = []
    for stage, blocks, N, sides, planes, dim_v in (
        (2, 4, 196, 28, 128, 8),
        (3, 6, 196, 28, 256, 24),
        (4, 3, 49, 14, 512, 48),
    ):
        weights = planes * (320 + dim_v) + dim_v**2  # 160 for queries, 160 for keys; without biases
        params = weights + (320 + 2 * dim_v) + (2 * sides - 2) * 20
        flops = 2 * N * weights + 2 * N * 160 * (2 * sides - 2) + 6 * 8 * N**2
        for block in range(blocks):
            by_hand.append((f"layer{stage}.{block}.conv2", 2 * 8 * N**2, params, flops))
    branches = count_of("aa_resnet50").branches
    assert [(b.layer, b.map_bytes, b.params, b.flops_profiler) for b in branches] == by_hand
    for index, kilobytes, params, flops in (
        (0, 600.25, 43464, 21.7e6),
        (4, 600.25, 90088, 40.0e6),
        (10, 37.52, 191656, 19.2e6),
    ):
        branch = branches[index]
        assert branch.map_bytes / 1024 == pytest.approx(kilobytes, abs=0.01)
        assert branch.params == params
        assert branch.flops_profiler == pytest.approx(flops, rel=2e-3)
    assert round(sum(b.map_bytes for b in branches) / 2**20, 2) == 5.97
    assert sum(b.params for b in branches) == 1289352
    assert round(sum(b.flops_profiler for b in branches) / 1e6, 1) == 384.4


def test_branches_that_evolve_have_the_convolution(capsys):
    rows = csv_of("cnn_cifar", "ea_conv_transformer_cifar", "--layers", capsys=capsys)
    assert [row["feat_size"] for row in rows] == ["8x8"] * 3 + ["4x4"] * 3
    assert [row["evolves"] for row in rows] == ["False", "True", "True"] * 2
    plain, evolving = rows[:2]

    def added(key):
        return int(evolving[key]) - int(plain[key])

    assert int(plain["map_bytes"]) == 2 * 4 * 64**2
    assert added("map_bytes") == 0
    assert added("params") == 4 * 4 * 9 + 4
    assert added("flops_profiler") == 2 * 4 * 4 * 9 * 64**2


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
    flops = [int(row["flops_profiler"]) for row in rows[:2]]
    assert flops[0] == 2 * 197 * 4 * 192**2 + 6 * 3 * 197**2
    assert flops[1] - flops[0] == 2 * 9 * 3**2 * 197**2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_attention_of_timm_is_counted_on_every_device(device):
    """By hand: 5 blocks of 64 tokens 64 wide, queries with keys and maps with values; patches of 48 numbers."""
    counts = count_of("vit_mini_patch4_32", 32, device)
    products = 5 * 2 * 64 * 64 * 64
    assert counts.attention_macs == products
    assert counts.macs == products + 5 * 64 * 12 * 64**2 + 64 * 48 * 64 + 640


def test_attention_of_torch_is_counted_and_leaves_the_network_as_it_was():
    """By hand: 2 layers of 17 tokens 24 wide, projections and products; patches of 192 numbers, 5 classes."""
    model = torchvision_vit().train().double()
    counts = count(model, (3, 32, 32))
    products = 2 * 2 * 17 * 17 * 24
    assert counts.attention_macs == products
    weights = 2 * 17 * (4 * 24**2 + 2 * 24 * 32)
    assert counts.macs == products + weights + 16 * 192 * 24 + 24 * 5
    assert all(module.training for module in model.modules())
    with pytest.raises(AssertionError, match="Wrong image"):
        count(model, (3, 40, 40))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["cait_xxs24_224", "pit_ti_224"])
def test_networks_whose_blocks_take_a_class_token_itself_are_counted(name):
    assert count_of(name, depth=[1] * 3 if name.startswith("pit") else 1).macs > 1e8


@pytest.mark.parametrize("num_heads", [4, 16])
def test_products_with_positions_are_counted_in_heads_of_any_width(num_heads):
    with torch.device("meta"):
        model = timm.create_model(
            "conv_transformer_cifar", widths=(16, 16, 16, 16), num_heads=num_heads
        )
    expected = 0
    for layer in attention_layers(model):
        height, width = layer.feat_size
        N = height * width
        expected += N**2 * (layer.dim_qk + layer.dim_v) + N * (height + width) * layer.dim_qk
    assert count(model, (3, 32, 32)).attention_macs == expected

"""`ea-vision models`: names, weights, and arithmetic against counts made by hand."""

import csv
import io

import pytest
import timm
import torch

from ea_vision.layers import attention_layers
from ea_vision.models import list_networks
from ea_vision.sizes import count, list_models, main, names_of
from tests.recorder.networks import torchvision_vit
from tests.refused import refused


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
    with refused(message):
        main(argv)


def test_weights_are_names_that_timm_creates():
    ours = list_models(names_of(["conv_transformer"]), weights=True)
    assert ours
    for row in ours:
        assert row["weights"] == "comes with ea_vision"
        assert timm.models.is_model_pretrained(row["model"])
    for row in list_models(names_of(["ea_deit_"]), weights=True):
        assert row["weights"].startswith("hub: timm/")


def test_weights_that_are_shipped_come_first():
    rows = list_models(names_of(["aa_resnet"]), weights=True)
    shipped = [row["weights"] == "comes with ea_vision" for row in rows]
    assert shipped[0]
    assert shipped == sorted(shipped, reverse=True)


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


def count_of(name, side=224, device="meta", **options):
    with torch.device(device):
        return count(timm.create_model(name, **options), (3, side, side))


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

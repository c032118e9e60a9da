"""`ea-vision models`: names, weights, and arithmetic against counts made by hand."""

import pytest
import timm
import torch

from ea_vision.layers import attention_layers
from ea_vision.models import list_networks
from ea_vision.sizes import count, list_models, main, names_of
from tests.recorder.networks import torchvision_vit
from tests.refused import refused


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
        (["."], "the list is of networks by name; . needs --sizes"),
        (["hf-hub:a/b"], "the list is of networks by name; hf-hub:a/b needs"),
        (["resnet50.a1_in2k"], "resnet50 has no weights 'a1_in2k'; did you mean a1"),
    ],
)
def test_bad_input(argv, message):
    with refused(message):
        main(argv)


def test_weights_that_timm_creates_and_those_of_a_tag():
    ours = list_models(names_of(["conv_transformer"]))
    assert any(row["weights"] for row in ours)
    for row in ours:
        assert bool(row["weights"]) == timm.models.is_model_pretrained(row["model"])
    [row] = list_models(["resnet50.a2_in1k"])
    assert row["weights"] == "a2_in1k"


def test_sizes_of_an_augmented_resnet(capsys):
    assert main(["--sizes", "resnet34", "aa_resnet34"]) == 0
    _, _, plain, augmented = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in augmented.split("|")]
    assert cells[1:4] == ["aa_resnet34", "224x224", "20.69"]
    assert cells[5:7] == ["26", "20 x 8 x (14x14) + 6 x 8 x (7x7)"]
    assert [cell.strip() for cell in plain.split("|")][5:7] == ["0", ""]


def count_of(name, side=224, device="meta", **options):
    with torch.device(device):
        return count(timm.create_model(name, **options), (3, side, side))


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
    depth = [1, 1, 1] if name.startswith("pit") else 1
    assert count_of(name, depth=depth).macs > 1e8


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

"""What recording costs: the maps that are kept are counted, and the plain forward's peak is that of its tensors."""
import timm
import torch
from torch import nn

from ea_vision.measure.recording_cost import main, measure, peak_of


def test_kept_maps_and_peaks_are_those_of_the_tensors():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3)
    cost = measure(model, torch.rand(2, 3, 32, 32), repeats=1)
    assert cost.kept == 2 * 2 * 3 * 5 * 5 * 4  # layers, images, heads, queries, keys, bytes
    assert cost.recorded_peak >= cost.peak + cost.kept / 2 and min(cost.seconds, cost.recorded_seconds) > 0
    assert measure(model, torch.rand(2, 3, 32, 32), layers=[2], repeats=1).kept == cost.kept / 2


def test_the_peak_of_two_layers():
    model, x = nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 4)), torch.rand(16, 8)
    with torch.no_grad():
        assert peak_of(lambda: model(x), [*model.parameters(), x]) == 4 * 16 * (100 + 4)


def test_the_table(capsys):
    assert main(["vit_tiny_patch16_224", "--layers", "1,12", "--repeats", "1"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| vit_tiny_patch16_224 | 224 | 2 |") and row.count("|") == head.count("|")
    assert row.split("|")[-2].strip() == "0.9"  # 2 x 3 x 197 x 197 x 4 bytes

"""The papers' ways of counting operations, against counts made by hand and the published figures."""

import numpy as np
import pytest
import timm
import torch

from experiments.counting import count_as_papers
from experiments.published import counted, tables


def count_of(name, side=224):
    with torch.device("meta"):
        return count_as_papers(timm.create_model(name), (3, side, side))


def published():
    """Return the papers' rows of networks that classify, without the deepest."""
    rows = []
    for table in ("imagenet", "mnasnet", "wide-resnet", "share", "position"):
        rows += tables()[table]["rows"]
    return [row for row in rows if row["gflops"] and row["model"][-3:] not in ("101", "152")]


@pytest.mark.parametrize("row", published(), ids=lambda row: row["label"])
def test_sizes_are_the_papers_and_arithmetic_within_two_percent(row):
    """ResNets by both ways of counting; the AA paper's other families by the profiler's."""
    [data] = row["recipes"]
    count = counted(row, data)
    assert count.profiler / 1e9 == pytest.approx(row["gflops"], rel=0.02)
    near = 0.15 if row["note"] else 0.06  # published.md says where a size is not as printed
    assert count.counts.params / 1e6 == pytest.approx(row["params_m"], abs=near)
    if "resnet" in row["model"]:
        assert count.paper / 1e9 == pytest.approx(row["gflops"], rel=0.02)


def test_positions_that_learn_nothing_add_nothing():
    rows = tables()["position"]["rows"][-4:]
    none, sine, coord, relative = [counted(row, "ImageNet").counts.params for row in rows]
    assert none == sine < relative
    assert none < coord


def test_the_profilers_counting_of_whole_networks():
    """Totals worked out beside the AA paper's, which prints 8.3 for its AA-ResNet-50; EA adds its map convolutions."""
    aa = count_of("aa_resnet50")
    ea = count_of("ea_aa_resnet50")
    assert round(aa.profiler / 1e9, 2) == 8.31
    assert sum(branch.evolves for branch in ea.branches) == 11
    # an evolution convolution: 8 x 8 x 9 multiply-adds a pixel of the N x N map
    added = 8 * 8 * 9 * (9 * 196**2 + 2 * 49**2)
    assert ea.profiler - aa.profiler == 2 * added
    assert ea.counts.macs - aa.counts.macs == added
    plain = count_of("cnn_cifar", 32)
    assert plain.profiler == plain.paper == 2 * plain.counts.macs
    assert not plain.branches


def test_branches_are_the_aa_papers_table_9():
    """Published: 600 KB, 43k, 22M; 600 KB, 90k, 40M; 37.5 KB, 190k, 19M; in all 6 MB in training, 600 KB in inference,
    1.3M, 390M."""
    expected = []
    for stage, blocks, N, sides, planes, dim_v in (
        (2, 4, 196, 28, 128, 8),
        (3, 6, 196, 28, 256, 24),
        (4, 3, 49, 14, 512, 48),
    ):
        weights = planes * (320 + dim_v) + dim_v**2  # 160 for queries, 160 for keys; without biases
        params = weights + (320 + 2 * dim_v) + (2 * sides - 2) * 20
        flops = 2 * N * weights + 2 * N * 160 * (2 * sides - 2) + 6 * 8 * N**2
        for block in range(blocks):
            expected.append((f"layer{stage}.{block}.conv2", 2 * 8 * N**2, params, flops))
    branches = count_of("aa_resnet50").branches
    assert [(b.layer, b.map_bytes, b.params, b.flops) for b in branches] == expected
    sizes = np.array(expected)[:, 1:].astype(float) / (1024, 1e3, 1e6)
    published = [(600, 43, 22), (600, 90, 40), (37.5, 190, 19)]
    np.testing.assert_allclose(sizes[[0, 4, 10]], published, rtol=0.02)
    np.testing.assert_allclose(sizes.sum(0), (6 * 1024, 1300, 390), rtol=0.02)


def test_branches_of_a_vision_transformer():
    """By hand: K 3, T 197, C 192; qkv and projection, then a convolution over maps and two gates."""
    expected = []
    for number in range(12):
        evolves = number > 0
        params = 4 * 192**2 + 4 * 192 + evolves * (9 * 3**2 + 3 + 2)
        flops = 2 * 197 * 4 * 192**2 + 6 * 3 * 197**2 + evolves * 2 * 9 * 3**2 * 197**2
        expected.append((f"blocks.{number}.attn", evolves, params, flops))
    branches = count_of("ea_vit_tiny_patch16_224").branches
    assert [(b.layer, b.evolves, b.params, b.flops) for b in branches] == expected

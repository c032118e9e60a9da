"""The papers' ways of counting operations, against counts made by hand and the published figures."""

import numpy as np
import pytest
import timm
import torch

from experiments.counting import count_as_papers
from experiments.published import counted, figures, tables


def count_of(name, side=224):
    with torch.device("meta"):
        return count_as_papers(timm.create_model(name), (3, side, side))


def published():
    """Return the papers' rows of networks that classify, without the deepest."""
    rows = []
    for table in ("imagenet", "mnasnet", "wide-resnet"):
        rows += tables()[table]["rows"]
    return [row for row in rows if not row["model"].endswith(("101", "152"))]


@pytest.mark.parametrize("row", published(), ids=lambda row: row["model"])
def test_arithmetic_is_the_papers_within_two_percent(row):
    """The EA paper's ResNets by both ways of counting; the AA paper's other families by the profiler's."""
    [data] = row["recipes"]
    count = counted(row, data)
    assert count.profiler / 1e9 == pytest.approx(row["gflops"], rel=0.02)
    params = count.counts.params / 1e6
    assert params == pytest.approx(figures(row["model"])["params_m"], abs=0.15)
    if "resnet" in row["model"]:
        assert count.paper / 1e9 == pytest.approx(row["gflops"], rel=0.02)


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


def test_branches_that_evolve_have_the_convolution():
    """It has 2 x 3 x 3 x K x K operations for each element of a map."""
    branches = count_of("ea_conv_transformer_cifar", 32).branches
    plain, evolving, *_ = branches
    assert [branch.evolves for branch in branches] == [False, True, True] * 2
    assert plain.map_bytes == evolving.map_bytes == 2 * 4 * 64**2
    assert evolving.params - plain.params == 4 * 4 * 9 + 4
    assert evolving.flops - plain.flops == 2 * 4 * 4 * 9 * 64**2


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

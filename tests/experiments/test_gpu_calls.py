"""Calls of a training step on a GPU, counted by fake tensors, stay within bounds."""

import pytest
import timm
import torch
import torch.nn.functional as F

from experiments.gpu_calls import CountCalls, count, walk_backward

pytest.importorskip("triton")

MOST = {
    "aa_resnet50": (700, 800),
    "ea_aa_resnet50": (600, 720),
    "ea_conv_transformer_cifar with qk_norm": (450, 550),
}


@pytest.mark.parametrize("name", MOST)
def test_calls_of_a_training_step(name):
    forward, backward = count(name)
    most_forward, most_backward = MOST[name]
    assert 200 < forward.total() <= most_forward
    assert 200 < backward.total() <= most_backward


def test_the_walk_makes_the_calls_of_the_engine():
    model = timm.create_model("resnet18").train()
    images = torch.randn(2, 3, 32, 32)
    counts = []
    for run in (torch.Tensor.backward, walk_backward):
        model.zero_grad()
        loss = F.cross_entropy(model(images), torch.zeros(2, dtype=torch.int64))
        with torch.set_grad_enabled(run is torch.Tensor.backward), CountCalls() as counter:
            run(loss)
        counts.append(counter.calls)
    assert counts[0] == counts[1]


def test_tiles_compiled_at_first_use():
    figures = pytest.importorskip("experiments.kernel_figures")
    assert 20 < figures.compilations_at_first_use("ea_aa_resnet50").total() <= 40

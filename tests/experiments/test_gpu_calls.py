"""Calls of a training step on a GPU, counted by fake tensors, stay within bounds."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from ea_vision import ops
from experiments.gpu_calls import CountCalls, count, pretended_gpu, walk_backward
from tests.experiments.pages import page_says

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
    compiled = figures.compilations_at_first_use("ea_aa_resnet50").total()
    page_says("experiments/kernels.md", "The compiler's figures", f"compiles {compiled} kernels")


@pytest.mark.parametrize("compiles, expected", [(False, "triton"), (True, "sdpa")])
def test_small_maps_of_aa_take_triton_unless_compiled(compiles, expected, monkeypatch):
    taken = []
    monkeypatch.setattr(ops, "log_once", lambda key, *_: taken.append(key[1]))
    with pretended_gpu(), FakeTensorMode(), torch.device("cuda"):
        q, k, v = torch.empty(3, 1, 2, 16, 8, dtype=torch.bfloat16)
        tables = torch.empty(2, 7, 8)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiles)
        ops.evolving_attention(q, k, v, *tables, feat_size=(4, 4), need_logits=False)
    assert taken == [expected]

"""Gradients of several processes: buckets are averaged during backward, also when compiled, and their memory layout.

Private names: a step of one process is compared with that of two.
"""

import warnings

import pytest
import timm
import torch
from torch import nn

from ea_vision.base.processes import World
from tests.engine.runner import make_trainer

CPU = torch.device("cpu")


@pytest.fixture
def _warn_always():
    """Let torch repeat each warning every time."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.fixture
def eager_compile(monkeypatch):
    """Let torch.compile split networks as always, without compiling kernels."""
    torch_compile = torch.compile

    def compile(model, mode, dynamic):
        return torch_compile(model, backend="aot_eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile)


def two(folder, model, **given):
    """Return the training loop of the first of two processes."""
    return make_trainer(folder, model, classes=4, world=World(0, 2, CPU), batch_size=4, **given)


def compiled_parts(node):
    """Return the nodes of an autograd graph that are compiled backward passes."""
    seen = set()
    left = [node]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return [node for node in seen if "CompiledFunction" in node.name()]


def test_compiled_gradients_are_averaged_while_backward_goes_on(group, tmp_path, eager_compile):
    """Inside DDP, torch splits the compiled graph at bucket borders, so a bucket is sent between two parts."""
    hidden = [nn.Linear(512, 512) for _ in range(4)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 512), *hidden, nn.Linear(512, 4))
    trainer = two(tmp_path, model, compile=True)
    events = []

    def sent(state, bucket):
        events.append("bucket")
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    trainer.net.register_comm_hook(None, sent)
    images = torch.randn(4, 3, 2, 2)
    targets = torch.arange(4)
    for _ in range(2):  # DDP forms its buckets anew after the first
        events.clear()
        loss = trainer._batch_loss(images, targets)
        parts = compiled_parts(loss.grad_fn)
        for part in parts:
            part.register_prehook(lambda _: events.append("part"))
        loss.backward()
    assert len(parts) >= 2
    assert events.count("part") == len(parts)
    while events[-1] != "part":
        events.pop()
    assert "bucket" in events


def test_gradients_lie_in_the_buckets_as_their_weights_do(group, _warn_always, tmp_path):
    """Also gradients of channels-last map convolutions: no copies to and from the buckets, and no warning from DDP."""
    model = timm.create_model("ea_conv_transformer_cifar", num_classes=4, widths=[8, 8, 8, 8])
    trainer = two(tmp_path, model, channels_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            trainer.optimizer.zero_grad()
            trainer._batch_loss(torch.randn(4, 3, 32, 32), torch.arange(4)).backward()
    buckets = set()
    maps = 0
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride()
        buckets.add(parameter.grad.untyped_storage().data_ptr())
        if "evolution.convs" in name and parameter.ndim == 4:
            maps += 1
            assert parameter.is_contiguous(memory_format=torch.channels_last)
    assert maps == 4
    assert len(buckets) < 5


def test_cuda_graphs_that_torch_leaves_out_train_all_the_same(tmp_path, eager_compile):
    """On a CPU torch makes no CUDA graphs: the mode still runs through the trainer's update, with its step marks."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))
    options = {"compile": True, "compile_mode": "reduce-overhead"}
    trainer = make_trainer(tmp_path, model, classes=4, batch_size=4, **options)
    for size in (4, 4, 3):
        numbers = torch.arange(size)
        trainer._update([(torch.randn(size, 3, 2, 2), numbers, numbers)])
    assert not trainer.check()

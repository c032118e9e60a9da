"""The recorder holds what the network computed, and does not change what the network computes."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close

from ea_vision.layers import AugmentedConv2d
from ea_vision.recorder.recording import PARTS, record_attention, recordable_layers
from tests.layers.oracle import by_head, evolved_maps
from tests.models.test_vision_transformer import active
from tests.models.test_vision_transformer import tiny as tiny_vit
from tests.recorder.networks import (
    check_closed,
    hooks_of,
    images,
    made,
    recorded,
    tiny,
    torchvision_vit,
)
from tests.refused import refused

EA = "ea_conv_transformer_cifar"
PA = "pa_conv_transformer_cifar"
VIT = "ea_vit_tiny_patch16_224"


def small(batch=2, height=16, width=16):
    return images(height, width, batch)


def modules_by_number(model):
    return {layer.number: model.get_submodule(layer.name) for layer in recordable_layers(model)}


def ours():
    return tiny(attn_drop_rate=0.2), small(1)


def theirs():
    return torchvision_vit(dropout=0.2, attention_dropout=0.3), images(batch=1)


def timms():
    model, _ = made("vit, wide")
    return model, images(32, 48, 1)


@pytest.mark.parametrize(
    "name, options",
    [
        (EA, {"alpha": 0.3, "beta": 0.6}),
        (EA, {"qk_norm": True}),
        (PA, {"alpha": 0.4, "num_layers": 0}),
        (PA, {"num_layers": 2}),
        (VIT, {}),
        (VIT, {"evolution": "pa", "num_layers": 2, "learnable": True}),
        (VIT, {"learnable": "per_head"}),
        (VIT, {"prefix": "pass", "attn_layers": [2]}),
        (VIT, {"reg_tokens": 2, "class_token": False, "global_pool": "avg"}),
    ],
)
@torch.no_grad()
def test_recorded_parts_satisfy_the_equations_of_the_evolution(name, options):
    if name == VIT:
        model = active(tiny_vit(**options))
        model.set_input_size((32, 40))
        grids = [(4, 5)] * 3
    else:
        model = tiny(name, **options)
        grids = [(8, 10)] * 3 + [(4, 5)] * 3
    prefix = getattr(model, "num_prefix_tokens", 0)
    maps = recorded(model.double(), images(32, 40).double(), PARTS)
    for (number, module), (height, width) in zip(
        modules_by_number(model).items(), grids, strict=True
    ):
        layer = maps[number]
        tokens = prefix + height * width
        assert layer.feat_size == (height, width)
        assert layer.num_prefix_tokens == prefix
        assert layer.logits.shape[2:] == (tokens, tokens)
        assert torch.equal(layer.attn, layer.logits.softmax(-1))
        evolution = module.evolution
        if evolution is None:  # a chain begins
            assert layer.prev_logits is None
            assert layer.conv_logits is None
            assert torch.equal(layer.self_logits, layer.logits)
            continue
        previous = layer.prev_logits
        own = layer.self_logits
        assert torch.equal(previous, maps[number - 1].logits)
        assert_close(layer.logits, evolved_maps(evolution, own, previous))
        alpha = by_head(evolution.alpha)
        mixed = previous if evolution.predict else alpha * previous + (1 - alpha) * own
        assert_close(layer.conv_logits, evolution.convolve(mixed))


@torch.no_grad()
def test_attention_times_values_is_the_attention_branch():
    """This shows that rows are queries in row-major order, and that maps are not transposed."""
    layer = AugmentedConv2d(6, 10, dim_qk=8, dim_v=4, num_heads=2, feat_size=(3, 5)).eval()
    x = torch.randn(2, 6, 3, 5)
    v = layer.heads_of(layer.qkv(layer.branch_input(x)))[2]
    attended = recorded(layer, x)[1].attn @ v
    image = attended.transpose(1, 2).reshape(2, 3, 5, 4).permute(0, 3, 1, 2)
    assert_close(layer.proj(image), layer(x)[0][:, 6:])


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("make", [ours, theirs])
def test_outputs_gradients_and_random_numbers_stay_and_maps_are_those_before_dropout(make, train):
    """Outputs are bit-identical; with nn.MultiheadAttention, which leaves its fast path, up to the last bits."""

    def step(record):
        torch.manual_seed(0)
        model, x = make()
        model.train(train)
        torch.manual_seed(3)
        with record_attention(model) if record else nullcontext({}) as maps:
            output = model(x)
            output.square().sum().backward()
        for layer in maps.values():
            assert_close(layer.attn.sum(-1), torch.ones(layer.attn.shape[:3]))
            assert not layer.attn.requires_grad
        gradients = [parameter.grad for parameter in model.parameters()]
        return [output, torch.rand(1), *gradients]

    limit = 0 if make is ours else 1e-5
    assert_close(step(True), step(False), atol=limit, rtol=limit)


def test_only_what_is_asked_for_is_kept():
    model = tiny()
    x = small()
    everything = recorded(model, x, "logits")
    maps = recorded(model, x, ["logits"], [2, 5], [3, 1])
    assert list(maps) == [2, 5]
    for number, layer in maps.items():
        assert layer.heads == (3, 1)
        assert layer.recorded() == ("logits",)
        assert layer.attn is None
        assert torch.equal(layer.logits, everything[number].logits[:, [3, 1]])
        assert layer.logits.untyped_storage().nbytes() == 4 * layer.logits.numel()
    name = "stages.2.blocks.1.conv"
    one = recorded(model, x, "logits", name, 3)
    assert list(one) == [2]
    assert one[2].heads == (3,)
    assert torch.equal(one[2].logits, maps[2].logits[:, :1])
    assert everything[name] is everything[2]
    with pytest.raises(KeyError, match="layer 2 .* has recorded logits; got 'attn'"):
        maps[2]["attn"]
    with pytest.raises(KeyError, match=rf"recorded layers are 2 \({name}\)"):
        one[1]


@pytest.mark.parametrize("name", [EA, "pa_aa_resnet34", "ea_aa_resnet50"])
def test_layers_are_numbered_as_the_forward_runs_and_maps_may_be_rectangular(name):
    model = timm.create_model(name, num_classes=2, img_size=(32, 64)).eval()
    layers = modules_by_number(model)
    ran = []
    for module in layers.values():
        module.register_forward_hook(lambda module, *_: ran.append(module))
    maps = recorded(model, small(1, 32, 64))
    forwards = 2  # one of them is recorded
    assert ran == forwards * list(layers.values())
    assert list(maps) == list(layers)
    for layer in maps.values():
        assert layer.feat_size[1] == 2 * layer.feat_size[0]
    if name == "pa_aa_resnet34":
        assert len(maps) == 26
        names = [maps[number].name for number in (16, 17, 18)]
        assert names == ["layer3.3.conv2", "layer3.4.conv1", "layer3.4.conv2"]


def test_of_several_forwards_and_of_several_runs_of_a_block_the_last_is_kept(caplog):
    model = tiny()
    with torch.no_grad(), record_attention(model) as maps:
        model(small())
        model(small(3, 24, 16))
        assert {layer.attn.shape[0] for layer in maps.values()} == {3}
        assert maps[1].feat_size == (6, 4)
        model.forward_intermediates(small(1), indices=[2], stop_early=True)
    assert list(maps) == [1, 2, 3]
    model = tiny_vit("vit_tiny_patch16_224").eval()
    x = images(32, 32)
    model.blocks[-1].load_state_dict(model.blocks[0].state_dict())
    recording = recorded(model, x)
    assert not caplog.messages
    model.blocks[-1] = model.blocks[0]
    shared = recorded(model, x)
    [said] = caplog.messages
    assert "attention layer 1 (blocks.0.attn) runs several times in one forward" in said
    assert len(shared) == len(recording) - 1
    assert torch.equal(shared[1].attn, recording[len(recording)].attn)
    assert not torch.equal(shared[1].attn, recording[1].attn)


def test_gradient_checkpointing_records_once():
    plain = recorded(tiny(), small(), PARTS)
    model = tiny()
    model.set_grad_checkpointing()
    with record_attention(model, parts=PARTS) as maps:
        output = model(small())
        held = dict(maps)
        output.sum().backward()
    assert list(maps) == list(plain)
    for number, layer in plain.items():
        assert maps[number] is held[number]
        assert maps[number].recorded() == layer.recorded()
        for part in layer.recorded():
            assert_close(maps[number][part], layer[part])


def test_wrapped_networks(group):
    """DistributedDataParallel, and torch.compile around it."""
    model = tiny()
    plain = recorded(model, small())
    parallel = nn.parallel.DistributedDataParallel(model)
    for wrapped in (
        parallel,
        torch.compile(model, backend="eager"),
        torch.compile(parallel, backend="eager"),
    ):
        with torch.no_grad(), record_attention(wrapped) as maps:
            wrapped(small())
        assert torch.equal(maps["stages.3.blocks.0.conv"].attn, plain[4].attn)
    assert hooks_of(parallel) == 0


class Linear(nn.Module):
    num_heads = 2

    def forward(self, x):
        return x * x.sigmoid()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": [1, 99]}, r"1 \(stages.2.blocks.0.conv\), 2 .*; got \[99\]"),
        ({"heads": [4]}, r"heads of layer 1 .* are 0 to 3; got \[4\]"),
        (
            {"parts": ["maps", "attn"]},
            r"parts of the chosen layers: 1 .* has attn, logits.*; got \['maps'\]",
        ),
        ({"layers": []}, "got none"),
        ({"heads": "mean"}, r"heads of layer 1 .* are 0 to 3; got \['mean'\]"),
        ({"layers": 1.5}, r"2 .*; got \[1.5\]"),
        ({"heads": []}, "got none"),
        ({"parts": []}, "got none"),
        ({"model": nn.Linear(1, 1)}, "Linear has no attention layer that can be"),
        ({"model": "ea_conv_transformer_cifar"}, "a network is required, .* got 'ea_conv"),
    ],
)
def test_invalid_options_are_refused(options, message):
    options = {"model": tiny("conv_transformer_cifar"), **options}
    with refused(message, ValueError), record_attention(**options):
        pass


def test_a_block_without_a_map_says_so():
    idle = tiny("conv_transformer_cifar")
    message = "no forward ran attention layer 1 .*, 2 "
    with pytest.raises(RuntimeError, match=message), record_attention(idle):
        pass
    linear = Linear()
    message = "layer 1 .* ran, and no map went through softmax, scaled_dot"
    with pytest.raises(RuntimeError, match=message), record_attention(linear):
        linear(torch.ones(1))
    assert hooks_of(idle) == hooks_of(linear) == 0


@pytest.mark.parametrize("make", [ours, theirs, timms])
def test_nothing_is_kept_alive_and_an_error_in_a_forward_leaves_no_trace(make):
    model, x = make()
    layers = modules_by_number(model)
    numbers = list(layers)
    handle = layers.pop(2).register_forward_hook(lambda *_: 1 / 0)
    layers.clear()
    with pytest.raises(ZeroDivisionError), record_attention(model):
        model(x)
    assert hooks_of(model) == 1
    assert torch._C._len_torch_function_stack() == 0
    with torch.no_grad(), record_attention(model) as maps:
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        model(x)
    assert list(maps) == numbers
    alive = weakref.ref(model)
    del model, handle
    gc.collect()
    assert alive() is None
    assert len(maps[1].attn) == 1


def test_maps_become_arrays(tmp_path):
    maps = recorded(tiny(), small(), ("attn", "conv_logits"), [1, 2], [0, 3])
    maps.to_npz(tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as held:
        assert "layer1.conv_logits" not in held
        assert held["layer2.name"] == maps[2].name
        assert np.array_equal(held["layer2.conv_logits"], maps[2].conv_logits)
        assert held["layer1.heads"].tolist() == [0, 3]
        assert held["layer1.feat_size"].tolist() == [4, 4]
    arrays = recorded(*made("vit_pe_core_tiny_patch16_384")).arrays()
    assert list(arrays["layer4.query_names"]) == ["pool"]
    assert list(arrays["layer4.prefix_names"]) == ["cls"]


# ---- threads ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def maps_of(model, x):
    with record_attention(model) as maps:
        model(x)
    return attention(maps)


@torch.no_grad()
def output_of(model, x):
    return model(x)


def attention(maps):
    return {number: layer.attn for number, layer in maps.items()}


def check_equal(maps, expected):
    assert_close(maps, expected, atol=0, rtol=0)


@pytest.mark.parametrize("make", [ours, theirs, timms])
def test_each_thread_has_its_own_maps_and_bystanders_their_outputs(make):
    model, x = make()
    inputs = [x.roll(n, -1) for n in range(12)]
    bystander = (output_of, inputs)
    jobs = [(maps_of, inputs[::2]), (maps_of, inputs[1::2]), bystander, bystander]
    barrier = threading.Barrier(len(jobs))

    def run(job):
        work, batches = job
        return [work(model, batch) for batch in batches]

    def run_with_the_others(job):
        barrier.wait(timeout=60)
        return run(job)

    expected = list(map(run, jobs))
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(run_with_the_others, jobs, timeout=60))
    assert_close(results, expected, atol=1e-6, rtol=1e-5)
    assert hooks_of(model) == 0


def test_two_recorders_and_two_networks_do_not_disturb_one_another():
    one, x = ours()
    other, y = timms()
    expected_of_one = maps_of(one, x)
    expected_of_other = maps_of(other, y)
    with (
        torch.no_grad(),
        record_attention(one, [1]) as first,
        record_attention(one) as both,
        record_attention(other) as second,
    ):
        one(x)
        other(y)
    check_equal(attention(first), {1: expected_of_one[1]})
    check_equal(attention(both), expected_of_one)
    check_equal(attention(second), expected_of_other)


def test_compilation_is_on_again_when_the_last_of_two_threads_has_ended():
    model, x = timms()
    compiled_graphs = []

    def backend(graph, _):
        compiled_graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    inside = threading.Event()
    go_on = threading.Event()

    def watch():
        with torch.no_grad(), record_attention(model):
            model(x)
            inside.set()
            go_on.wait()

    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        with record_attention(model):
            model(x)
            other = pool.submit(watch)
            inside.wait()
        compiled(x)
        assert not compiled_graphs  # the other one still records
        go_on.set()
        other.result()
        compiled(x)
        assert compiled_graphs


@pytest.mark.parametrize("make", [ours, timms])
@pytest.mark.parametrize("by", ["another recorder", "another thread"])
def test_a_recorder_closed_out_of_order_says_so_and_disturbs_nothing(by, make):
    model, x = make()
    expected = maps_of(model, x)
    first = record_attention(model)
    second = record_attention(model)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        first.__enter__()
        if by == "another thread":
            closed = pool.submit(first.__exit__, None, None, None)
            with pytest.raises(RuntimeError, match="closed by the thread that opened it"):
                closed.result()
        else:
            maps = second.__enter__()
            message = "closed in the reverse order in which they were opened"
            with pytest.raises(RuntimeError, match=message):
                first.__exit__(None, None, None)
            model(x)  # still recorded
            second.__exit__(None, None, None)
            check_equal(attention(maps), expected)
    check_equal(maps_of(model, x), expected)
    check_closed(model)

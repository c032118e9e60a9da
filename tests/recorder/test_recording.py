"""The recorder: what it holds is what the network computed, and the network does not notice."""

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
from tests.models.test_vision_transformer import active
from tests.models.test_vision_transformer import tiny as tiny_vit
from tests.recorder.networks import hooks_of, images, made, recorded, tiny, torchvision_vit

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
    return made("vit, wide")[0], images(32, 48, 1)


@pytest.mark.parametrize(
    "name,options",
    [
        ("ea_conv_transformer_cifar", dict(alpha=0.3, beta=0.6)),
        ("ea_conv_transformer_cifar", dict(qk_norm=True)),
        ("pa_conv_transformer_cifar", dict(alpha=0.4, num_layers=0)),
        ("pa_conv_transformer_cifar", dict(num_layers=2)),
        (VIT, dict()),
        (VIT, dict(evolution="pa", num_layers=2, learnable=True)),
        (VIT, dict(learnable="per_head")),
        (VIT, dict(prefix="pass", attn_layers=[2])),
        (VIT, dict(reg_tokens=2, class_token=False, global_pool="avg")),
    ],
)
def test_recorded_parts_satisfy_the_equations_of_the_evolution(name, options):
    if name == VIT:
        model, x, grids = active(tiny_vit(**options)), images(32, 40), [(4, 5)] * 3
        model.set_input_size((32, 40))
    else:
        model, x, grids = tiny(name, **options), small(), [(4, 4)] * 3 + [(2, 2)] * 3
    maps, prefix = recorded(model, x, PARTS), getattr(model, "num_prefix_tokens", 0)
    for (number, module), grid in zip(modules_by_number(model).items(), grids, strict=True):
        layer, evolution = maps[number], module.evolution
        assert (layer.feat_size, layer.num_prefix_tokens) == (grid, prefix)
        assert layer.logits.shape[2:] == (prefix + grid[0] * grid[1],) * 2
        assert torch.equal(layer.attn, layer.logits.softmax(-1))
        if evolution is None:  # a chain begins
            assert layer.prev_logits is None and layer.conv_logits is None
            assert torch.equal(layer.self_logits, layer.logits)
            continue
        assert torch.equal(layer.prev_logits, maps[number - 1].logits)
        alpha, beta = (
            torch.as_tensor(gate).detach().reshape(-1, 1, 1)
            for gate in (evolution.alpha, evolution.beta)
        )
        before = own = alpha * layer.prev_logits + (1 - alpha) * layer.self_logits
        if evolution.predict:
            before, own, beta = layer.prev_logits, layer.self_logits, alpha
        with torch.no_grad():
            convolved = evolution.convolve(before)
        assert_close(layer.conv_logits, convolved, atol=1e-5, rtol=1e-4)
        assert_close(layer.logits, beta * convolved + (1 - beta) * own, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_attention_times_values_is_the_attention_branch():
    """So rows are queries, row by row over the image, and maps are not transposed."""
    layer, x = (
        AugmentedConv2d(6, 10, dim_qk=8, dim_v=4, num_heads=2, feat_size=(3, 5)).eval(),
        torch.randn(2, 6, 3, 5),
    )
    v = layer.heads_of(layer.qkv(layer.branch_input(x)))[2]
    out = (recorded(layer, x)[1].attn @ v).transpose(1, 2).reshape(2, 3, 5, 4).permute(0, 3, 1, 2)
    assert_close(layer.proj(out), layer(x)[0][:, 6:])


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("make", [ours, theirs])
def test_outputs_gradients_and_random_numbers_stay_and_maps_are_those_before_dropout(make, train):
    """Outputs are bit-identical, to the last bits with nn.MultiheadAttention, whose fast path is left."""

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
        return [output, torch.rand(1), *(p.grad for p in model.parameters())]

    limit = 0 if make is ours else 1e-5
    assert_close(step(True), step(False), atol=limit, rtol=limit)


def test_only_what_is_asked_for_is_kept():
    model, x = tiny(), small()
    everything, maps = recorded(model, x, "logits"), recorded(model, x, ["logits"], [2, 5], [3, 1])
    assert list(maps) == [2, 5] and maps[2].heads == (3, 1)
    for layer in maps.values():
        assert layer.recorded() == ("logits",) and layer.attn is None
        assert torch.equal(layer.logits, everything[layer.number].logits[:, [3, 1]])
        assert layer.logits.untyped_storage().nbytes() == 4 * layer.logits.numel()
    one = recorded(model, x, "logits", "stages.2.blocks.1.conv", 3)
    assert (
        list(one) == [2]
        and one[2].heads == (3,)
        and torch.equal(one[2].logits, maps[2].logits[:, :1])
    )
    assert everything["stages.2.blocks.1.conv"] is everything[2]
    with pytest.raises(KeyError, match="layer 2 .* has recorded logits; got 'attn'"):
        maps[2]["attn"]
    with pytest.raises(KeyError, match=r"recorded layers are 2 \(stages.2.blocks.1.conv\)"):
        one[1]


@pytest.mark.parametrize("name", ["ea_conv_transformer_cifar", "pa_aa_resnet34", "ea_aa_resnet50"])
def test_layers_are_numbered_as_the_forward_runs_and_maps_may_be_rectangular(name):
    model, ran = timm.create_model(name, num_classes=2, img_size=(32, 64)).eval(), []
    layers = modules_by_number(model)
    for module in layers.values():
        module.register_forward_hook(lambda m, *_: ran.append(m))
    maps = recorded(model, small(1, 32, 64))
    del ran[: len(layers)]  # of the forward that is not recorded
    assert ran == list(layers.values()) and list(maps) == list(layers)
    assert all(layer.feat_size[1] == 2 * layer.feat_size[0] for layer in maps.values())
    if name == "pa_aa_resnet34":
        assert len(maps) == 26
        assert [maps[number].name for number in (16, 17, 18)] == [
            "layer3.3.conv2",
            "layer3.4.conv1",
            "layer3.4.conv2",
        ]


def test_of_several_forwards_and_of_several_runs_of_a_block_the_last_is_kept():
    model = tiny()
    with torch.no_grad(), record_attention(model) as maps:
        model(small())
        model(small(3, 24, 16))
        assert {layer.attn.shape[0] for layer in maps.values()} == {3} and maps[1].feat_size == (
            6,
            4,
        )
        model.forward_intermediates(small(1), indices=[2], stop_early=True)
    assert list(maps) == [1, 2, 3]
    model, x = tiny_vit("vit_tiny_patch16_224").eval(), images(32, 32)
    model.blocks[-1].load_state_dict(model.blocks[0].state_dict())
    own = recorded(model, x)
    model.blocks[-1] = model.blocks[0]
    shared = recorded(model, x)
    assert len(shared) == len(own) - 1
    assert torch.equal(shared[1].attn, own[len(own)].attn) and not torch.equal(
        shared[1].attn, own[1].attn
    )


def test_gradient_checkpointing_records_once():
    model, plain = tiny(), recorded(tiny(), small(), PARTS)
    model.set_grad_checkpointing()
    with record_attention(model, parts=PARTS) as maps:
        output = model(small())
        held = dict(maps)
        output.sum().backward()
    assert list(maps) == list(plain)
    for number, layer in plain.items():
        assert maps[number] is held[number] and maps[number].recorded() == layer.recorded()
        for part in layer.recorded():
            assert_close(maps[number][part], layer[part])


def test_wrapped_networks(tmp_path):
    """DistributedDataParallel, and torch.compile around it."""
    model = tiny()
    plain = recorded(model, small())
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for wrapped in (
            nn.parallel.DistributedDataParallel(model),
            torch.compile(model, backend="eager"),
            torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
        ):
            with torch.no_grad(), record_attention(wrapped) as maps:
                wrapped(small())
            assert torch.equal(maps["stages.3.blocks.0.conv"].attn, plain[4].attn)
    finally:
        torch.distributed.destroy_process_group()
    assert hooks_of(wrapped) == 0


class Linear(nn.Module):
    num_heads = 2

    def forward(self, x):
        return x * x.sigmoid()


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(layers=[1, 99]), r"1 \(stages.2.blocks.0.conv\), 2 .*; got \[99\]"),
        (dict(heads=[4]), r"heads of layer 1 .* are 0 to 3; got \[4\]"),
        (
            dict(parts=["maps", "attn"]),
            r"parts must be some of .*, got \['maps'\]: 1 .* has attn, logits",
        ),
        (dict(layers=[]), "got none"),
        (dict(heads=[]), "got none"),
        (dict(parts=[]), "got none"),
        (dict(model=nn.Linear(1, 1)), "Linear has no attention layer that can be"),
    ],
)
def test_what_there_is_not_is_refused(options, message):
    with (
        pytest.raises(ValueError, match=message),
        record_attention(**{"model": tiny("conv_transformer_cifar"), **options}),
    ):
        pass


def test_a_block_without_a_map_says_so():
    for model, x, message in (
        (tiny("conv_transformer_cifar"), None, "no forward ran attention layer 1 .*, 2 "),
        (Linear(), torch.ones(1), "layer 1 .* ran, and no map went through softmax, scaled_dot"),
    ):
        with pytest.raises(RuntimeError, match=message), record_attention(model):
            if x is not None:
                model(x)
        assert hooks_of(model) == 0


@pytest.mark.parametrize("make", [ours, theirs, timms])
def test_nothing_is_kept_alive_and_an_error_in_a_forward_leaves_no_trace(make):
    model, x = make()
    inner, numbers = (
        modules_by_number(model)[2],
        [layer.number for layer in recordable_layers(model)],
    )
    handle = inner.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), record_attention(model):
        model(x)
    assert hooks_of(model) == 1 and torch._C._len_torch_function_stack() == 0
    with torch.no_grad(), record_attention(model) as maps:
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        model(x)
    assert list(maps) == numbers
    alive = weakref.ref(model)
    del model, handle, inner
    gc.collect()
    assert alive() is None and len(maps[1].attn) == 1


def test_maps_become_arrays(tmp_path):
    maps = recorded(tiny(), small(), ("attn", "conv_logits"), [1, 2], [0, 3])
    maps.to_npz(tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as held:
        assert "layer1.conv_logits" not in held and held["layer2.name"] == maps[2].name
        assert np.array_equal(held["layer2.conv_logits"], maps[2].conv_logits)
        assert held["layer1.heads"].tolist() == [0, 3] and held["layer1.feat_size"].tolist() == [
            4,
            4,
        ]
    arrays = recorded(*made("vit_pe_core_tiny_patch16_384")).arrays()
    assert list(arrays["layer4.query_names"]) == ["pool"] and list(
        arrays["layer4.prefix_names"]
    ) == ["cls"]


# ---- threads ---------------------------------------------------------------------------------------------------------


def maps_of(model, x):
    return {number: layer.attn for number, layer in recorded(model, x).items()}


@pytest.mark.parametrize("make", [ours, theirs, timms])
def test_each_thread_has_its_own_maps_and_bystanders_their_outputs(make):
    model, x = make()
    inputs, barrier = [x.roll(n, -1) for n in range(12)], threading.Barrier(4)
    with torch.no_grad():
        expected, outputs = [maps_of(model, x) for x in inputs], [model(x) for x in inputs]

    @torch.no_grad()
    def watch(x):
        with record_attention(model) as maps:
            model(x)
        return {number: layer.attn for number, layer in maps.items()}

    @torch.no_grad()
    def each(what, inputs):
        barrier.wait()
        return [what(x) for x in inputs]

    with ThreadPoolExecutor(4) as pool:
        futures = [
            (pool.submit(each, what, inputs[part]), wanted[part])
            for what, part, wanted in (
                (watch, slice(0, None, 2), expected),
                (watch, slice(1, None, 2), expected),
                *[(model, slice(None), outputs)] * 2,
            )
        ]
        for future, wanted in futures:
            assert_close(future.result(timeout=60), wanted, atol=1e-6, rtol=1e-5)
    assert hooks_of(model) == 0


def test_two_recorders_and_two_networks_do_not_disturb_one_another():
    (one, x), (other, y) = ours(), timms()
    expected, hers = maps_of(one, x), maps_of(other, y)
    with (
        torch.no_grad(),
        record_attention(one, [1]) as first,
        record_attention(one) as both,
        record_attention(other) as second,
    ):
        one(x)
        other(y)
    assert list(first) == [1]
    for maps, values in ((first, {1: expected[1]}), (both, expected), (second, hers)):
        assert all(torch.equal(maps[number].attn, attn) for number, attn in values.items())


def test_compilation_is_on_again_when_the_last_of_two_threads_has_ended():
    (model, x), calls = timms(), []
    compiled = torch.compile(model, backend=lambda graph, inputs: calls.append(1) or graph.forward)
    inside, go_on = threading.Event(), threading.Event()

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
        assert not calls  # the other one still records
        go_on.set()
        other.result()
        compiled(x)
        assert calls


@pytest.mark.parametrize("make", [ours, timms])
@pytest.mark.parametrize("by", ["another recorder", "another thread"])
def test_a_recorder_closed_out_of_order_says_so_and_disturbs_nothing(by, make):
    model, x = make()
    expected, first, second = maps_of(model, x), record_attention(model), record_attention(model)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        first.__enter__()
        if by == "another thread":
            with pytest.raises(RuntimeError, match="closed by the thread that opened it"):
                pool.submit(first.__exit__, None, None, None).result()
        else:
            maps = second.__enter__()
            with pytest.raises(
                RuntimeError, match="closed in the reverse order in which they were opened"
            ):
                first.__exit__(None, None, None)
            model(x)  # still recorded
            second.__exit__(None, None, None)
            assert all(torch.equal(maps[number].attn, attn) for number, attn in expected.items())
    assert all(torch.equal(attn, expected[number]) for number, attn in maps_of(model, x).items())
    assert hooks_of(model) == 0 and torch._C._len_torch_function_stack() == 0
    assert not any("_attend" in vars(module) for module in model.modules())

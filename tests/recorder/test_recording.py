"""The recorder: what it holds is what the network computed, and the network does not notice."""
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import nn

import ea_vision
from ea_vision.layers import AugmentedConv2d
from ea_vision.recorder.recording import PARTS, recordable_layers

TINY = dict(widths=(8, 8, 16, 16), num_classes=3, img_size=16)  # maps of 4x4 and 2x2, two chains of three layers


def tiny(name="ea_conv_transformer_cifar", **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**TINY, **kwargs}).eval()


def images(batch=2, height=16, width=16):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def modules_by_number(model):
    names = dict(model.named_modules())
    return {layer.number: names[layer.name] for layer in recordable_layers(model)}


@pytest.mark.parametrize("name,kwargs", [
    ("ea_conv_transformer_cifar", dict(alpha=0.3, beta=0.6)),
    ("ea_conv_transformer_cifar", dict(alpha=0.3, kernel_size=1)),
    ("ea_conv_transformer_cifar", dict(alpha=0.3, beta=0.6, qk_norm=True)),
    ("pa_conv_transformer_cifar", dict(alpha=0.4, num_layers=0)),
    ("pa_conv_transformer_cifar", dict(alpha=0.4, num_layers=2)),
])
def test_recorded_parts_satisfy_the_equations_of_the_evolution(name, kwargs):
    model = tiny(name, **kwargs)
    with torch.no_grad(), ea_vision.record_attention(model, parts=PARTS) as maps:
        model(images())
    assert list(maps) == [1, 2, 3, 4, 5, 6]
    for number, module in modules_by_number(model).items():
        layer = maps[number]
        torch.testing.assert_close(layer.attn, layer.logits.softmax(-1), rtol=0, atol=0)
        if number in (1, 4):  # a chain begins
            assert layer.prev_logits is None and layer.conv_logits is None
            assert torch.equal(layer.self_logits, layer.logits)
            continue
        assert torch.equal(layer.prev_logits, maps[number - 1].logits)
        alpha = module.evolution.alpha
        with torch.no_grad():
            if name.startswith("ea"):
                beta, mixed = module.evolution.beta, alpha * layer.prev_logits + (1 - alpha) * layer.self_logits
                convolved = F.relu(module.evolution.convs[0](mixed))
                expected = beta * layer.conv_logits + (1 - beta) * mixed
            else:
                convolved = layer.prev_logits
                for conv in module.evolution.convs:
                    convolved = F.relu(conv(convolved))
                expected = alpha * layer.conv_logits + (1 - alpha) * layer.self_logits
        torch.testing.assert_close(layer.conv_logits, convolved)
        torch.testing.assert_close(layer.logits, expected)


def test_attention_times_values_is_the_attention_branch():
    torch.manual_seed(0)
    layer = AugmentedConv2d(6, 10, dim_qk=8, dim_v=4, num_heads=2, feat_size=(3, 5)).eval()
    x = torch.randn(2, 6, 3, 5)
    with torch.no_grad(), ea_vision.record_attention(layer) as maps:
        y, _ = layer(x)
    with torch.no_grad():
        v = layer.heads_of(layer.qkv(layer.branch_input(x)))[2]
        out = (maps[1].attn @ v).transpose(1, 2).reshape(2, 3, 5, 4).permute(0, 3, 1, 2)
        torch.testing.assert_close(layer.proj(out), y[:, 6:])


def layer_attending_at(down, right, heads=2, size=(5, 6)):
    """A layer whose every query attends to the pixel `down` rows below and `right` columns to the right of it."""
    H, W = size
    layer = AugmentedConv2d(3, 8, dim_qk=2 * heads, dim_v=heads, num_heads=heads, feat_size=size).eval()
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.bias.zero_()
        layer.qkv.bias[:2 * heads] = 1.0
        layer.height_rel.zero_()[H - 1 + down] = 60.0
        layer.width_rel.zero_()[W - 1 + right] = 60.0
    return layer


@pytest.mark.parametrize("down,right", [(0, 0), (1, -2), (-3, 1)])
def test_rows_are_queries_and_maps_are_not_transposed(down, right):
    layer = layer_attending_at(down, right)
    with torch.no_grad(), ea_vision.record_attention(layer) as maps:
        layer(torch.randn(1, 3, 5, 6))
    attn = maps[1].spatial()
    assert maps[1].feat_size == (5, 6) and attn.shape == (1, 2, 5, 6, 5, 6)
    for row in range(5):
        for col in range(6):
            if 0 <= row + down < 5 and 0 <= col + right < 6:
                assert attn[0, :, row, col, row + down, col + right].min() > 0.99
                assert maps[1].attn[0, 0, row * 6 + col].argmax() == (row + down) * 6 + col + right


@pytest.mark.parametrize("train", [False, True])
def test_recording_changes_no_bit_of_outputs_and_gradients(train):
    def step(record):
        model = tiny(attn_drop_rate=0.2).train(train)
        torch.manual_seed(3)
        if record:
            with ea_vision.record_attention(model, parts=PARTS):
                output = model(images())
                output.square().sum().backward()
        else:
            output = model(images())
            output.square().sum().backward()
        return output, [p.grad for p in model.parameters()]

    (plain, plain_grads), (recorded, grads) = step(False), step(True)
    assert torch.equal(plain, recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain_grads, grads, strict=True))


def test_probabilities_are_those_before_dropout():
    model = tiny(attn_drop_rate=0.5).train()
    with ea_vision.record_attention(model) as maps:
        model(images())
    torch.testing.assert_close(maps[1].attn.sum(-1), torch.ones(2, 4, 16))
    assert not maps[1].attn.requires_grad


def test_only_what_is_asked_for_is_kept():
    model = tiny()
    with torch.no_grad(), ea_vision.record_attention(model, layers=[2, 5], heads=[3, 1], parts=["logits"]) as maps:
        model(images())
    assert list(maps) == [2, 5] and maps[2].heads == (3, 1)
    for layer in maps.values():
        assert [part for part in PARTS if getattr(layer, part) is not None] == ["logits"]
        N = layer.feat_size[0] * layer.feat_size[1]
        assert layer.logits.shape == (2, 2, N, N)
        assert layer.logits.untyped_storage().nbytes() == 4 * layer.logits.numel()
    with torch.no_grad(), ea_vision.record_attention(model, parts=["logits"]) as everything:
        model(images())
    assert torch.equal(maps[2].logits, everything[2].logits[:, [3, 1]])
    assert len(maps) == 2 and 1 not in maps and everything["stages.2.blocks.1.conv"] is everything[2]
    with pytest.raises(KeyError, match="layer 2 .* has recorded logits; got 'attn'"):
        maps[2]["attn"]
    with pytest.raises(KeyError, match=r"recorded layers are 2 \(stages.2.blocks.1.conv\)"):
        maps[1]


def test_one_is_taken_where_several_are():
    model = tiny()
    with torch.no_grad(), ea_vision.record_attention(model, layers=2, heads=3, parts="logits") as one, \
            ea_vision.record_attention(model, layers="stages.2.blocks.1.conv", heads=[3], parts=["logits"]) as several:
        model(images())
    assert list(one) == [2] and one[2].heads == (3,) and torch.equal(one[2].logits, several[2].logits)


def test_layers_by_name_and_rectangular_maps():
    model = timm.create_model("aa_resnet34", img_size=(64, 96), num_classes=2).eval()
    assert len(recordable_layers(model)) == 26
    names = [layer.name for layer in recordable_layers(model)]
    assert names[15:18] == ["layer3.3.conv2", "layer3.4.conv1", "layer3.4.conv2"]
    with torch.no_grad(), ea_vision.record_attention(model, layers=["layer3.3.conv2", 26]) as maps:
        model(images(1, 64, 96))
    assert list(maps) == [16, 26] and maps[16].feat_size == (4, 6) and maps[26].feat_size == (2, 3)
    assert maps[16].spatial().shape == (1, 8, 4, 6, 4, 6)


def test_the_order_of_modules_is_the_order_of_the_forward():
    for name in ("ea_conv_transformer_cifar", "pa_aa_resnet34", "ea_aa_resnet50"):
        model = timm.create_model(name, num_classes=2, img_size=32).eval()
        ran = []
        handles = [m.register_forward_hook(lambda m, *_, ran=ran: ran.append(m)) for m in model.modules()
                   if isinstance(m, AugmentedConv2d)]
        with torch.no_grad():
            model(images(1, 32, 32))
        assert ran == list(modules_by_number(model).values()) and len(handles) == len(ran)


def test_of_several_forwards_the_last_is_kept():
    model = tiny()
    with torch.no_grad(), ea_vision.record_attention(model) as maps:
        model(images())
        model(images(3, 24, 16))
    assert {layer.attn.shape[0] for layer in maps.values()} == {3} and maps[1].feat_size == (6, 4)
    with torch.no_grad(), ea_vision.record_attention(model) as maps:
        model(images())
        model.forward_intermediates(images(1), indices=[2], stop_early=True)
    assert list(maps) == [1, 2, 3]


def test_gradient_checkpointing_records_once():
    expected = tiny().train()
    with ea_vision.record_attention(expected, parts=PARTS) as plain:
        expected(images())
    model = tiny().train()
    model.set_grad_checkpointing()
    with ea_vision.record_attention(model, parts=PARTS) as maps:
        output = model(images())
        held = dict(maps)
        output.sum().backward()
    assert list(maps) == list(plain)
    for number in plain:
        assert maps[number] is held[number]
        for part in PARTS:
            a, b = getattr(maps[number], part), getattr(plain[number], part)
            assert (a is None and b is None) or torch.equal(a, b)


def test_autocast_keeps_probabilities_in_float32():
    model = tiny()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), ea_vision.record_attention(model) as maps:
        model(images())
    assert maps[1].attn.dtype == torch.float32
    torch.testing.assert_close(maps[6].attn.sum(-1), torch.ones(2, 4, 4))


@pytest.mark.slow
def test_compiled_models():
    model = tiny()
    with torch.no_grad():
        with ea_vision.record_attention(model) as plain:
            model(images())
        compiled = torch.compile(model, backend="eager")
        compiled(images())
        with ea_vision.record_attention(compiled) as maps:
            compiled(images())
        assert torch.equal(maps["stages.2.blocks.2.conv"].attn, plain[3].attn)
        calls = []
        torch.compile(model, backend=lambda graph, inputs: calls.append(1) or graph.forward)(images(4))
        assert calls  # compilation is on again


def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny()
        wrapped = nn.parallel.DistributedDataParallel(model)
        with ea_vision.record_attention(wrapped) as maps:
            wrapped(images())
    finally:
        torch.distributed.destroy_process_group()
    assert maps["stages.3.blocks.0.conv"].number == 4 and hooks_of(wrapped) == 0


def test_vit_maps_and_fused_attention():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=2, num_classes=3).eval()
    x = images(2, 32, 48)
    with torch.no_grad():
        expected = model(x)
        with ea_vision.record_attention(model) as maps:
            output = model(x)
    assert torch.equal(output, expected) and hooks_of(model) == 0
    layer = maps[2]
    assert layer.name == "blocks.1.attn" and layer.attn.shape == (2, 3, 7, 7) and layer.feat_size == (2, 3)
    assert layer.num_prefix_tokens == 1 and layer.spatial().shape == (2, 3, 2, 3, 2, 3)
    assert torch.equal(layer.spatial()[0, 0, 1, 2, 0, 1], layer.attn[0, 0, 1 + 5, 1 + 1])


@pytest.mark.parametrize("scale_pos_embed", [False, True])
def test_bottleneck_attention_maps_give_its_output(scale_pos_embed):
    torch.manual_seed(0)
    layer = BottleneckAttn(8, 8, feat_size=(3, 4), num_heads=2, scale_pos_embed=scale_pos_embed).eval()
    x = torch.randn(2, 8, 3, 4)
    with torch.no_grad(), ea_vision.record_attention(layer, parts=("attn", "logits")) as maps:
        y = layer(x)
        v = layer.qkv(x)[:, -8:].reshape(2, 2, 4, 12).transpose(-2, -1)
        torch.testing.assert_close((maps[1].attn @ v).transpose(-2, -1).reshape(2, 8, 3, 4), y)
    assert maps[1].feat_size == (3, 4)


def test_errors_name_what_there_is():
    model = tiny("conv_transformer_cifar")
    with pytest.raises(ValueError, match=r"1 \(stages.2.blocks.0.conv\), 2 .*; got \[99\]"), \
            ea_vision.record_attention(model, layers=[1, 99]):
        pass
    with pytest.raises(ValueError, match=r"heads of layer 1 .* are 0 to 3; got \[4\]"), \
            ea_vision.record_attention(model, heads=[4]):
        pass
    with pytest.raises(ValueError, match="parts must be some of attn, .*got"), \
            ea_vision.record_attention(model, parts=["maps"]):
        pass
    with pytest.raises(ValueError, match="none of the chosen layers has 'conv_logits'"), \
            ea_vision.record_attention(model, parts=["conv_logits"]):
        pass
    for empty in (dict(layers=[]), dict(heads=[]), dict(parts=[])):
        with pytest.raises(ValueError, match="got"), ea_vision.record_attention(model, **empty):
            pass
    for name in ("cnn_cifar", "resnet18"):
        with pytest.raises(ValueError, match="has no attention layer that can be recorded"), \
                ea_vision.record_attention(timm.create_model(name)):
            pass
    with pytest.raises(RuntimeError, match=r"no forward ran attention layer 2 \(stages.2.blocks.1.conv\)"), \
            ea_vision.record_attention(model, layers=[2]):
        pass
    assert hooks_of(model) == 0


def test_an_error_inside_leaves_the_model_as_it_was():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    fused = model.blocks[0].attn.fused_attn
    with pytest.raises(ZeroDivisionError), ea_vision.record_attention(model):
        1 / 0  # noqa: B018
    assert hooks_of(model) == 0 and model.blocks[0].attn.fused_attn == fused


def test_a_thousand_recordings_leave_memory_where_it_was():
    torch.manual_seed(0)
    layer = AugmentedConv2d(4, 8, dim_qk=8, dim_v=4, num_heads=2, feat_size=(16, 16)).eval()
    x = torch.randn(1, 4, 16, 16)

    def record(times):
        for _ in range(times):
            with torch.no_grad(), ea_vision.record_attention(layer, parts=("attn", "logits")) as maps:
                layer(x)
        return maps

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / 2 ** 20

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc to read the resident memory")
    record(100)
    gc.collect()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    before = resident()
    maps = record(1000)  # each holds 1 MiB
    gc.collect()
    assert resident() - before < 32
    assert sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) <= tensors + 2
    assert hooks_of(layer) == 0 and len(maps) == 1


def test_maps_do_not_keep_the_model_alive():
    model = tiny()
    alive = weakref.ref(model)
    with torch.no_grad(), ea_vision.record_attention(model) as maps:
        model(images())
    del model
    gc.collect()
    assert alive() is None and maps[1].attn.shape == (2, 4, 16, 16)


def test_maps_say_what_they_are_and_become_arrays(tmp_path):
    model, parts = tiny(), ("attn", "conv_logits")
    with torch.no_grad(), ea_vision.record_attention(model, [1, 2], heads=[0, 3], parts=parts) as maps:
        model(images())
    names = [layer.name for layer in recordable_layers(model)]
    assert repr(maps) == ("attention maps of 2 layers\n"
                          f"  layer 1 ({names[0]}), map 4x4, heads 0, 3: attn of 2x2x16x16\n"
                          f"  layer 2 ({names[1]}), map 4x4, heads 0, 3: attn, conv_logits of 2x2x16x16")
    maps.to_npz(tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as held:
        assert set(held) == {f"layer{number}.{name}" for number in (1, 2)
                             for name in ("name", "heads", "feat_size", "key_size", "prefix_names",
                                          "query_names", "attn")} | {"layer2.conv_logits"}
        assert np.array_equal(held["layer2.conv_logits"], maps[2].conv_logits) and held["layer2.name"] == names[1]
        assert held["layer1.heads"].tolist() == [0, 3]

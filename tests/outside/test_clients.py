"""Other people's tools on our networks, each by its standard recipe.

The extra `clients` of pyproject.toml installs the tools; a test whose tool is missing is skipped.
"""

import copy
from itertools import product

import pytest
import timm
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import ea_vision
from tests.models.zoo import CHAINED, OUTLINES, TINY, give_gradients, images, lively, sample, woken

RESNETS = ["aa_resnet34", "ea_aa_resnet34", "ea_aa_resnet50"]
# one evolving network of each family
EVOLVING = [
    "ea_aa_resnet34",
    "ea_aa_mnasnet_075",
    "ea_aa_wrn28_10_cifar",
    "ea_conv_transformer_cifar",
]
EVOLVED = "evolved transformer"


def network(name):
    torch.manual_seed(0)
    if name == EVOLVED:
        plain = timm.create_model("vit_tiny_patch16_224", **TINY)
        return ea_vision.evolve(plain.eval(), start="paper")
    return lively(name, num_classes=5).eval()


def images_for(name):
    return images() if name == EVOLVED else sample(name)


def attention_paths(model):
    return [path for path, module in model.named_modules() if hasattr(module, "qkv")]


def last_activation(block):
    """Return the module whose output a ResNet's block returns."""
    return block.act3 if hasattr(block, "act3") else block.act2


@pytest.mark.parametrize("name", RESNETS)
def test_blocks_and_stages_return_tensors_where_no_layer_reads_their_maps(name):
    model = network(name)
    types = []
    for path in ("layer4", "layer4.0", "layer3", "layer1.0"):
        module = model.get_submodule(path)
        module.register_forward_hook(lambda module, args, output: types.append(type(output)))
    model(sample(name))
    with ea_vision.ops.use_implementation("reference"):
        model(sample(name))
    assert types == [torch.Tensor] * 8


@pytest.mark.parametrize("name", RESNETS)
@pytest.mark.parametrize("path", ["layer4", "layer4[-1]"])
def test_grad_cam(name, path):
    pytorch_grad_cam = pytest.importorskip("pytorch_grad_cam")
    model = network(name)
    x = sample(name)
    stage = model.layer4
    target = stage if path == "layer4" else stage[-1]
    with pytorch_grad_cam.GradCAM(model, [target]) as cam:
        maps = cam(x, targets=None)
    with pytorch_grad_cam.GradCAM(model, [last_activation(stage[-1])]) as cam:
        expected = cam(x, targets=None)
    assert maps.shape == (2, 64, 64)
    assert maps.max() > 0
    assert_close(torch.from_numpy(maps), torch.from_numpy(expected))


@pytest.mark.parametrize("name", RESNETS)
def test_captums_layer_grad_cam_and_integrated_gradients(name):
    attr = pytest.importorskip("captum.attr")
    model = network(name)
    x = sample(name)
    block = model.layer4[-1]
    maps = attr.LayerGradCam(model, block).attribute(x, target=1)
    expected = attr.LayerGradCam(model, last_activation(block)).attribute(x, target=1)
    assert maps.any()
    assert_close(maps, expected)
    attributions, delta = attr.IntegratedGradients(model).attribute(
        x, target=1, n_steps=64, return_convergence_delta=True
    )
    change = (model(x) - model(torch.zeros_like(x)))[:, 1]
    assert_close(attributions.sum((1, 2, 3)), change, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "name", [*[name for name in CHAINED if attention_paths(OUTLINES[name])], EVOLVED]
)
@torch.no_grad()
def test_plain_fx_keeps_our_layers_whole(name):
    model = network(name)
    x = images_for(name)
    graph = torch.fx.symbolic_trace(model)
    assert_close(graph(x), model(x))
    called = {node.target for node in graph.graph.nodes if node.op == "call_module"}
    assert name == EVOLVED or set(attention_paths(model)) <= called


@pytest.mark.parametrize("name", [*EVOLVING, EVOLVED])
def test_lora_on_the_projections_trains_and_merges(name):
    peft = pytest.importorskip("peft")
    model = network(name)
    x = images_for(name)
    expected = model(x)
    paths = [".".join(pair) for pair in product(attention_paths(model), ("qkv", "proj"))]
    config = peft.LoraConfig(r=4, target_modules=paths)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    assert_close(tuned(x), expected)
    adapters = [p for n, p in tuned.named_parameters() if "lora_B" in n]
    assert len(adapters) == len(paths)
    give_gradients(tuned.train(), x)
    expected = tuned.eval()(x)
    with torch.no_grad():
        for adapter in adapters:
            assert adapter.grad.any()
            adapter.sub_(0.01 * adapter.grad.sign())
    y = tuned(x)
    assert not torch.equal(y, expected)
    assert_close(tuned.merge_and_unload()(x), y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", EVOLVING)
def test_vmap_over_an_ensemble(name, layout):
    x = sample(name).to(memory_format=layout)
    models = [lively(name, num_classes=5).eval() for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(parameters, buffers, x):
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    outputs = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    expected = torch.stack([model(x) for model in models])
    assert_close(outputs, expected, atol=1e-4, rtol=1e-4)


def test_unet_on_an_evolving_encoder():
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = woken(smp.Unet("tu-ea_aa_resnet34", encoder_weights=None, classes=3)).eval()
    assert model(images(64, 64)).shape == (2, 3, 64, 64)
    give_gradients(model, images(64, 64))
    gates = [p for n, p in model.named_parameters() if ".evolution." in n]
    assert gates
    assert all(p.grad.any() for p in gates)


def test_torchinfo_counts_every_parameter():
    torchinfo = pytest.importorskip("torchinfo")
    model = network("ea_aa_resnet34")
    summary = torchinfo.summary(model, (1, 3, 64, 64), verbose=0)
    assert summary.total_params == sum(p.numel() for p in model.parameters())


def test_transformers_timm_wrapper_is_saved_and_loaded(tmp_path):
    config = transformers.TimmWrapperConfig(architecture="ea_conv_transformer_cifar", num_labels=3)
    model = transformers.TimmWrapperForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    again = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(images()).logits, model(images()).logits)


@pytest.mark.parametrize("name", ["ea_conv_transformer_cifar", EVOLVED])
def test_fully_sharded_gradients_are_the_plain_ones(name, group):
    """FSDP2, of one process."""
    model = network(name)
    x = images()
    give_gradients(model, x)
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    sharded = fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    give_gradients(sharded, x)
    for key, parameter in sharded.named_parameters():
        assert_close(parameter.grad.full_tensor(), expected[key])

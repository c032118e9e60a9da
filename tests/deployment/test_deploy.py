"""A deployed network computes the same as the network, in PyTorch and as an exported program."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode

import ea_vision
from ea_vision.base.errors import RunError, UsageError
from ea_vision.deployment import attention
from ea_vision.deployment.evolution import fold_evolution
from ea_vision.layers import AugmentedConv2d, EvolvingAttention, MapsAttention
from ea_vision.models import list_networks
from ea_vision.models.inputs import input_channels
from tests.models import test_any_transformer as transformers
from tests.models import zoo
from tests.refused import refused
from tests.slow import slow_but

SMALL = {  # keywords by family; every kind of layer stays
    "attn_resnet": {
        "layers": (1, 1, 2, 2),
        "channels": (32, 64, 128, 128),
        "qk_ratio": 0.25,
        "v_ratio": 0.125,
    },
    "attn_mnasnet": {"multiplier": 0.5},
    "vision_transformer": {
        "embed_dim": 48,
        "depth": 3,
        "num_heads": 3,
        "img_size": (32, 48),
        "learnable": "per_head",
    },
}
SLOW = {"ea_aa_wrn28_10_cifar", "pa_aa_wrn28_10_cifar"}
CIFAR = "ea_conv_transformer_cifar"


def small(name, **options):
    """A network in evaluation mode whose statistics, biases and gates differ from their initial values."""
    torch.manual_seed(3)
    family_kwargs = SMALL.get(zoo.family(name), {})
    model = zoo.with_statistics(zoo.lively(name, **{**family_kwargs, **options})).eval()
    for gate in ea_vision.layers.learnable_gates(model).values():
        nn.init.uniform_(gate, 0.2, 0.8)
    return model


class NoFloat64(TorchFunctionMode):
    """Treats every tensor as on a device without float64, like mps, except tensors that `cpu` returned."""

    def __init__(self):
        super().__init__()
        self.on_cpu = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cpu:
            self.on_cpu.append(args[0].clone())
            return self.on_cpu[-1]
        if func is torch.Tensor.double and all(args[0] is not each for each in self.on_cpu):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return func(*args, **(kwargs or {}))


def test_a_device_without_float64():
    model = small(CIFAR, learnable="per_head")
    with NoFloat64() as device:
        deployed = ea_vision.deploy(model)
    assert device.on_cpu
    assert difference(model, deployed, torch.randn(1, 3, 32, 32)) < 1e-4


class DoubledEvolution(EvolvingAttention):
    def forward(self, logits, prev_logits):
        return 2 * super().forward(logits, prev_logits)


def test_a_subclass_of_an_evolution_is_not_folded():
    assert fold_evolution(DoubledEvolution(2), 2) is None


def test_what_is_folded_lies_on_the_layers_device():
    evolution = EvolvingAttention(2, alpha=0.4, beta=0.6)
    options = dict(dim_qk=4, dim_v=4, num_heads=2, feat_size=(3, 4))
    layer = AugmentedConv2d(4, 8, evolution=evolution, **options)
    layer.qkv.to("meta")
    attention.make_portable(layer)
    assert len(list(layer.folded.buffers())) > 1
    assert {buffer.device.type for buffer in layer.buffers()} == {"meta"}


def sizes_of(name):
    """Return (batch, height, width) of test images for a small network: its own size, and others."""
    if zoo.family(name) == "vision_transformer":
        return [(1, 32, 48), (3, 32, 48)]
    if zoo.input_side(name) == 32:
        return [(1, 32, 32), (2, 24, 40), (1, 40, 16)]
    return [(1, 64, 64), (2, 96, 64)]


def difference(model, other, images):
    with torch.no_grad():
        expected = model(images.to(next(model.parameters()).dtype))
        largest = (other(images) - expected).abs().max()
        return float(largest / expected.abs().max())


def check(model, name, monkeypatch):
    """Deploy a network and compare outputs: in float32 to 2e-5, or to twice the network's own rounding error if that is
    larger; in float64 to 1e-6."""
    deployed = ea_vision.deploy(model)
    for batch, height, width in sizes_of(name):
        images = torch.randn(batch, 3, height, width)
        exact = copy.deepcopy(model).double()
        rounding = max(2e-5, 2 * difference(exact, model, images))
        assert difference(model, deployed, images) < rounding
        with monkeypatch.context() as patch:
            patch.setattr(attention, "exporting", lambda: True)
            assert difference(model, deployed, images) < rounding
            # weights were rounded to float32
            folded = copy.deepcopy(deployed).double()
            assert difference(exact, folded, images.double()) < 1e-6
    return deployed


@pytest.mark.parametrize(
    "name", slow_but({*zoo.SMALL, "ea_vit_tiny_patch16_224"} - SLOW, list_networks())
)
def test_equals_the_network(name, monkeypatch):
    model = small(name)
    before = copy.deepcopy(model.state_dict())
    deployed = check(model, name, monkeypatch)
    for layer in deployed.modules():
        evolves = isinstance(layer, MapsAttention) and layer.evolution is not None
        if "csan" not in name and (evolves or isinstance(layer, AugmentedConv2d)):
            assert hasattr(layer, "folded")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} has changed"


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.01},
        {"alpha": 0.0},
        {"beta": 0.0},
        {"alpha": 0.6, "beta": 0.3},
        {"alpha": 1.0},
        {"learnable": "per_head"},
        {"position": "none", "kernel_size": 5},
        {"position": "sine", "num_heads": 2},
        {"position": "coord", "window": 3},
        {"qk_norm": True},
        {"evolution": "pa", "num_layers": 0, "alpha": 0.3},
        {"evolution": "pa", "num_layers": 2, "learnable": "per_head"},
        {"evolution": "pa", "learnable": True},
        {"evolution": "residual"},  # it cannot be folded, and stays
    ],
    ids=str,
)
def test_equals_the_network_with(options, monkeypatch):
    """Gates that are learned may have either sign."""
    model = small(CIFAR, **{"widths": (8, 16, 16, 16), "num_heads": 4, **options})
    for gate in ea_vision.layers.learnable_gates(model).values():
        nn.init.uniform_(gate, -1.0, 1.5)
    if "qk_norm" in options:
        for layer in zoo.layers_of(model):
            nn.init.uniform_(layer.qk_gain, 0.5, 2.0)
    check(model, CIFAR, monkeypatch)


@pytest.mark.parametrize("prefix", ["convolve", "pass"])
@pytest.mark.parametrize("kind", ["ea", "pa"])
def test_equals_a_transformer_whose_prefix_tokens(prefix, kind, monkeypatch):
    name = f"{kind}_vit_tiny_patch16_224"
    model = small(name, prefix=prefix, global_pool="avg", reg_tokens=2, init_values=0.5)
    check(model, name, monkeypatch)


def halve(module, inputs, output):
    out, logits = output
    return out / 2, logits


def double(module, inputs):
    return (2 * inputs[0],)


ALTERED = {
    "a hook": lambda layer: layer.register_forward_hook(halve),
    "pruned": lambda layer: prune.l1_unstructured(layer.qkv, "weight", 0.5),
    "parametrised": lambda layer: parametrizations.weight_norm(layer.proj),
    "a hook on its projection": lambda layer: layer.proj.register_forward_pre_hook(double),
}


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED)
def test_altered_layers_stay(alter, monkeypatch):
    model = small(CIFAR, widths=(8, 16, 16, 16))
    layers = zoo.layers_of(model)
    alter(layers[1])
    model.eval()
    deployed = check(model, CIFAR, monkeypatch)
    folded = [hasattr(layer, "folded") for layer in zoo.layers_of(deployed)]
    assert folded == [layer is not layers[1] for layer in layers]


def test_refuses_training_mode_and_what_is_no_network():
    model = timm.create_model("cnn_cifar")
    for network, message in ((model, "evaluation mode is required"), ("ea_aa_resnet50", "got str")):
        with refused(message, ValueError):
            ea_vision.deploy(network)
    model.eval()
    model.get_submodule("stages.0.blocks.0.bn").train()
    with refused(r"got stages\.0\.blocks\.0\.bn in training mode", ValueError):
        ea_vision.deploy(model)


# ---- the sizes of images that copy and network are compared on -------------------------------------------------------


class Unsized(nn.Module):
    """A network that does not say its size. least: the smallest side in pixels that it takes."""

    def __init__(self, least=1, largest=10**6):
        super().__init__()
        self.least = least
        self.largest = largest
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        if not self.least <= min(x.shape[2:]) <= max(x.shape[2:]) <= self.largest:
            raise ValueError("another size required")
        return self.conv(x).mean((2, 3))


@pytest.mark.parametrize(
    "model, sizes",
    [
        (Unsized(), [(224, 224), (160, 192)] * 2),
        (Unsized(largest=64), [(224, 224), (32, 32), (24, 24)] + [(32, 32), (24, 24)]),
        (Unsized(64, 64), [(224, 224), (32, 32), (64, 64), (32, 32), (64, 64)]),
        (timm.create_model("cnn_cifar"), [(32, 32), (24, 24)] * 2),
    ],
    ids=["any size", "small ones", "one size", "a configuration"],
)
def test_compares_at_the_networks_own_size_or_a_usual_one_and_at_another(model, sizes):
    """`sizes`: those of the images that the network and then its copy are run on."""
    seen = []

    def note(_, args):
        seen.append(tuple(args[0].shape[2:]))

    model.register_forward_pre_hook(note)
    ea_vision.deploy(model.eval())
    assert seen == sizes


def test_a_difference_at_the_second_size_is_an_error():
    class Changed(Unsized):
        """A network whose copy gives another result for images that are not square."""

        copied = False

        def __deepcopy__(self, memo):
            other = copy.copy(self)
            other.copied = True
            return other

        def forward(self, x):
            wrong = self.copied and x.shape[2] != x.shape[3]
            return super().forward(x) + wrong

    with refused("on noise of 160x192 pixels its copy's outputs differ", RunError):
        ea_vision.deploy(Changed().eval())


@pytest.mark.parametrize(
    "outputs, kind, message",
    [
        (
            lambda x: x + torch.rand(()),
            RunError,
            r"on noise of \d+x\d+ pixels .* outputs differ by .* run twice",
        ),
        (lambda x: object(), UsageError, "a network that returns tensors is required, got object"),
        (
            lambda x: x @ x.new_ones(1, 99),
            UsageError,
            r"for images \(1, 3, 384, 384\) is required, and Unsized fails on one",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(outputs, kind, message):
    """Outputs of chance, no tensors, or none."""
    model = Unsized().eval()
    model.forward = outputs
    with refused(message, kind):
        ea_vision.deploy(model)


@pytest.mark.parametrize("name", [CIFAR, "vit_mini_patch4_32", "resnet18", "tresnet_m"])
def test_takes_networks_of_images_with_13_channels(name):
    torch.manual_seed(0)
    small = {"layers": (1, 1, 1, 1), "width_factor": 0.25} if name == "tresnet_m" else {}
    model = timm.create_model(name, in_chans=13, **small).eval()
    images = torch.randn(2, 13, 32, 32)
    torch.testing.assert_close(ea_vision.deploy(model)(images), model(images), atol=1e-4, rtol=1e-4)
    assert input_channels(nn.Sequential(model)) == 13, "without a configuration"


@pytest.mark.parametrize("evolved", [False, True])
@pytest.mark.parametrize("name", ["torchvision", "naflexvit_base_patch16_gap"])
def test_takes_transformers_of_other_sizes_and_without_a_convolution(name, evolved):
    model = transformers.create(name)
    if evolved:
        model = ea_vision.evolve(model)
    deployed = ea_vision.deploy(model.eval())
    assert difference(model, deployed, zoo.images(*transformers.size_of(name))) < 1e-5

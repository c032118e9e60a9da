"""The networks that the model tests use: the smallest of each kind, or all if EA_VISION_TEST_ALL is set."""

import copy
import os
import warnings
from unittest import mock

import timm
import torch
from timm.models import create_feature_extractor, get_graph_node_names
from timm.optim import create_optimizer_v2
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from ea_vision.layers import AugmentedConv2d, SpatialTransformer
from ea_vision.models import ChainedNetwork, get_network, list_networks

ALL = bool(os.environ.get("EA_VISION_TEST_ALL"))
# vision transformers have a file of their own
EVERY = [name for name in list_networks() if name not in list_networks("vision_transformer")]
CIFAR = list_networks("conv_transformer")
KINDS = "ea pa residual talking_heads reattention refiner mta conv2d xsa gated".split()
# a ViT of 4x4 patches
TINY = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=5)
SHRUNK = {  # keywords by family
    "wide_resnet": {"width": 1, "depth": 16},
    "attn_resnet": {"layers": (1, 1, 2, 1)},
    "conv_transformer": {"widths": (16, 32, 64, 64), "depth": 2},
}


def family(name):
    """The file of a network."""
    return timm.model_entrypoint(name).__module__.split(".")[-1]


def count(model):
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _undrawn(tensor, *_, **__):
    return tensor


# shapes alone; torch draws slowly on "meta"
with torch.device("meta"), mock.patch.object(torch.Tensor, "normal_", _undrawn, create=True):
    OUTLINES = {name: timm.create_model(name) for name in EVERY}
_SIZES = {name: count(model) for name, model in OUTLINES.items()}


def _smallest_of_each(kinds):
    """The smallest of each family's networks whose keywords of these types agree."""
    smallest = {}
    for name in sorted(EVERY, key=_SIZES.get):
        items = get_network(name).kwargs.items()
        kwargs = [item for item in items if isinstance(item[1], kinds)]
        smallest.setdefault((family(name), *sorted(kwargs, key=str)), name)
    return list(smallest.values())


# for tests that do not depend on width and depth: per family one network of each evolution, gate and block
SMALL = list(dict.fromkeys([*_smallest_of_each((str, bool)), *_smallest_of_each((type,))]))
TESTED = EVERY if ALL else SMALL


def shrunk(name):
    """The keywords under which the tests take a network."""
    return {} if ALL else SHRUNK.get(family(name), {})


def on_meta(name, **options):
    """A network of shapes alone."""
    with torch.device("meta"):
        return timm.create_model(name, **options)


def lively(name, **options):
    """A new model whose initial zeros are replaced."""
    return woken(timm.create_model(name, **{**shrunk(name), **options}))


def woken(model):
    """Replace initial zeros, which hide mistakes: last norms of branches, added attention, spatial transformers."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d) and not module.weight.any():
            torch.nn.init.constant_(module.weight, 0.2)
        elif isinstance(module, SpatialTransformer):
            torch.nn.init.normal_(module.fc.weight, std=0.01)
        elif isinstance(module, AugmentedConv2d) and not module.proj.weight.any():
            torch.nn.init.normal_(module.proj.weight, std=0.1)
    return model


def with_statistics(model, spread=0.1):
    """Move the statistics and biases of batch norms away from their start."""
    for module in model.modules():
        if hasattr(module, "running_mean"):
            torch.nn.init.uniform_(module.running_mean, -spread, spread)
            most = 1 + 2 * spread
            torch.nn.init.uniform_(module.running_var, 1 / most, most)
            torch.nn.init.uniform_(module.bias, -spread, spread)
    return model


@torch.no_grad()
def stirred(model, by=0.1):
    """Move every parameter of a network's mechanisms away from its start."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("evolution", "value_residual", "token_conv")):
            parameter += by * torch.randn_like(parameter)
    return model


CHAINED = [name for name in TESTED if isinstance(OUTLINES[name], ChainedNetwork)]
FAMILIES = TESTED  # for what takes long
if not ALL:
    FAMILIES = [name for name in TESTED if get_network(name).kwargs.get("evolution") == "ea"]


def images(height=32, width=32, batch=2):
    """The same at every call."""
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def give_gradients(model, x):
    """Run backward from the sum of squares of the outputs."""
    loss = model(x).square().sum()
    loss.backward()


def stepped(model, x=None):
    """Return the model after one step of SGD, with the gradients of the next step."""
    model.train()
    x = images() if x is None else x
    for rate in (0.05, 0.0):
        model.zero_grad()
        give_gradients(model, x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad.clamp(-1, 1))
    return model


def input_side(name):
    return timm.get_pretrained_cfg(name).input_size[-1]


def side(name):
    """Side of a small input, in pixels."""
    return min(64, input_side(name))


def sample(name, batch=2):
    """Small images for a network."""
    return images(side(name), side(name), batch)


def groups_of(model, **options):
    """The group of timm's AdamW in which each parameter is."""
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, **options)
    group_of = {}
    for group in optimizer.param_groups:
        group_of |= dict.fromkeys(group["params"], group)
    return group_of


def from_file(name, path, **options):
    """A network with the weights of a file in place of its own."""
    overlay = {"file": str(path)}
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **options)


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, AugmentedConv2d)]


def assert_checkpointing_changes_nothing(model, x, statistics=True, **near):
    """Compare outputs, gradients and, with `statistics`, running statistics, which move once."""

    def results(enable):
        twin = copy.deepcopy(model).train()
        twin.set_grad_checkpointing(enable)
        y = twin(x)
        y.square().sum().backward()
        gradients = [parameter.grad for parameter in twin.parameters()]
        assert all(gradient is not None for gradient in gradients)
        buffers = dict(twin.named_buffers()) if statistics else {}
        return y.detach(), gradients, buffers

    assert_close(results(True), results(False), **near)


@torch.no_grad()
def assert_intermediates(model, x):
    """Compare the features of each stage or block with the whole network and its feature_info; return them."""
    final, taken = model.forward_intermediates(x)
    assert_close(final, model.forward_features(x))
    for feature, info in zip(taken, model.feature_info, strict=True):
        assert feature.shape[1] == info["num_chs"]
        assert feature.shape[2] == x.shape[2] // info["reduction"]
    return taken


@torch.no_grad()
def assert_fx_agrees(model, x):
    """Compare with FX, timm's way of taking features, and torch.jit.trace."""
    expected = model(x)
    last_node = get_graph_node_names(model)[1][-1]
    extractor = create_feature_extractor(model, return_nodes=[last_node])
    assert_close(extractor(x)[last_node], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer names each Python number of a forward
        traced = torch.jit.trace(model, x, check_trace=False)
    assert_close(traced(x), expected)


@torch.no_grad()
def assert_compiles_and_exports(model, x, **near):
    """Compile once, in one graph; export for any batch size."""
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for images in (x, torch.randn_like(x)):
        assert_close(compiled(images), model(images), **near)
    assert counter.frame_count == 1
    torch._dynamo.reset()
    any_batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (x,), dynamic_shapes=any_batch)
    other = torch.randn(5, *x.shape[1:])
    assert_close(program.module()(other), model(other), **near)


@torch.no_grad()
def assert_onnx_agrees(model, x, folder):
    """Compare with torch.export's program, and ONNX Runtime's run of it."""
    import onnxruntime

    program = torch.export.export(model, (x,))
    assert_close(program.module()(x), model(x), atol=1e-4, rtol=1e-4)
    file = folder / "model.onnx"
    torch.onnx.export(program, (), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (name,) = [each.name for each in session.get_inputs()]
    (y,) = session.run(None, {name: x.numpy()})
    assert_close(torch.from_numpy(y), model(x), atol=1e-4, rtol=1e-3)


def idle(model, where=""):
    """Names of parameters, with this in their names, whose gradient is missing, not finite or 0."""
    names = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        moves = gradient is not None and gradient.isfinite().all() and gradient.any()
        if where in name and not moves:
            names.append(name)
    return names

"""How maps go from stage to stage and from block to block: whatever happens to the tensors between, a forward gives the
same result or an error that says what is missing, and nothing outlives it."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from ea_vision import evolve
from ea_vision.layers import attention_layers
from tests.models import test_huggingface as huggingface
from tests.models.test_any_transformer import create
from tests.models.zoo import TINY, images, lively, stirred
from tests.refused import refused

BLOCKS = ("blocks.0", "blocks.1")
LAYERS = ("encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1")
RESNET = dict(layers=(1, 1, 2, 1), num_classes=5)
# network: (how to create it, its input, names of two of its chained parts)
NETWORKS = {
    "resnet": (partial(lively, "ea_aa_resnet50", **RESNET), images(64, 64), ("layer2", "layer3")),
    "vit": (partial(create, "vit_tiny_patch16_224"), images(), BLOCKS),
    "bert": (
        partial(huggingface.create, "Bert"),
        torch.arange(3, 21).view(2, 9),
        ("encoder.layer.0", "encoder.layer.1"),
    ),
    "torchvision": (partial(create, "torchvision"), images(), LAYERS),
}
CHECKPOINTING = {
    "vit": lambda model: model.set_grad_checkpointing(),
    "bert": lambda model: model.train().gradient_checkpointing_enable({"use_reentrant": False}),
}


def alive(name):
    """Create a network whose every part has an effect; return it, its input, and the names of two chained parts."""
    torch.manual_seed(0)
    new, x, paths = NETWORKS[name]
    model = new().eval()
    if name != "resnet":  # which evolves by itself
        model = evolve(model, "ea", value_residual=True)
    return stirred(model, 0.2), x, paths


def run(model, x):
    output = model(x)
    return getattr(output, "last_hidden_state", output)


def maps_in_memory():
    """Count the living tensors that have the shape of a network's maps, or of the values of its heads."""
    sizes = {(2, 8, 16, 16), (2, 3, 17, 17), (2, 4, 9, 9), (2, 3, 17, 16), (2, 4, 9, 8)}
    gc.collect()
    # other tests leave fake tensors behind, whose sides are symbols
    living = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.ndim == 4]
    return sum(tuple(x.shape) in sizes for x in living)


class Around(nn.Module):
    """A wrapper that passes on a copy of what its module returns."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs) + 0


def gradients_of(output, model):
    weights = list(model.parameters())
    return torch.autograd.grad(output.square().sum(), weights, allow_unused=True)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "change",
    ["hook", "pre-hook", "wrapper", "sequence", "full_backward_hook", "full_backward_pre_hook"],
)
def test_hooks_copies_and_wrappers_between_parts_change_nothing(name, change):
    """Hooks of the backward pass make views of a module's tokens, also where checkpoints compute them again."""
    model, x, paths = alive(name)
    expected = run(model, x)
    gradients = gradients_of(expected, model)
    seen = set()
    if change == "sequence" and name == "bert":
        return  # transformers calls a block with keywords, which nn.Sequential does not take
    for path in paths:
        part = model.get_submodule(path)
        if change == "hook":
            part.register_forward_hook(lambda module, args, y: y * 1.0)
        elif change == "pre-hook":
            part.register_forward_pre_hook(lambda module, args: (args[0].clone(), *args[1:]))
        elif "backward" in change:
            layers = [] if name == "resnet" else attention_layers(part)
            for module in (part, *layers):
                getattr(module, f"register_{change}")(lambda module, *_: seen.add(module))
        else:
            model.set_submodule(path, Around(part) if change == "wrapper" else nn.Sequential(part))
    for again in range(2 if "backward" in change and name in CHECKPOINTING else 1):
        if again:
            CHECKPOINTING[name](model)
        actual = run(model, x)
        assert_close(actual, expected)
        assert_close(gradients_of(actual, model), gradients)
    assert len(seen) >= 2 * ("backward" in change)


def stem(model, x):
    return model.maxpool(model.forward_stem(x))


@pytest.mark.parametrize(
    "name, last", [("resnet", "layer3"), ("vit", "blocks.2"), ("bert", "encoder.layer.2")]
)
@torch.no_grad()
def test_maps_follow_their_tokens_to_another_device(name, last):
    """The device without numbers stands for a second one."""
    model, x, _ = alive(name)
    part = model.get_submodule(last).to("meta")
    part.register_forward_pre_hook(lambda _, args: (args[0].to("meta"), *args[1:]))
    outputs = []
    part.register_forward_hook(lambda _, args, y: outputs.append(y))
    part.register_forward_hook(lambda _, args, y: torch.zeros(y.shape))
    run(model, x)
    assert [y.device.type for y in outputs] == ["meta"]


@torch.no_grad()
def test_stages_run_by_hand_on_several_images_in_turns():
    model, x, _ = alive("resnet")
    pictures = [x, x.flip(3)]
    features = [stem(model, x) for x in pictures]
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        features = [stage(x) for x in features]
    assert_close(features, [model.forward_features(x) for x in pictures])


@pytest.mark.parametrize("change", [torch.clone, lambda z: z + 0])
def test_a_copy_by_hand_is_followed_or_the_error_says_what_is_lost(change):
    model, x, _ = alive("resnet")
    z = change(model.layer2(model.layer1(stem(model, x))))
    with refused("layer before.*lost", ValueError):
        model.layer3(z)
    with model.one_forward():
        z = change(model.layer2(model.layer1(stem(model, x))))
        assert_close(model.layer4(model.layer3(z)), model.forward_features(x))


class Stop(Exception):
    """Ends a forward early."""


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("ends", ["at its end", "early"])
def test_no_map_outlives_a_forward(name, grad, ends):
    model, x, paths = alive(name)
    with torch.set_grad_enabled(grad):
        if ends == "early":

            def stop(module, args):
                raise Stop

            part = model.get_submodule(paths[1])
            part.register_forward_pre_hook(stop)
            with pytest.raises(Stop):
                run(model, x)
        else:
            seen = []
            for path in paths:
                part = model.get_submodule(path)
                part.register_forward_hook(lambda _, args, y: seen.append(vars(y)))
            run(model, x)
            assert seen == [{}] * len(seen) != [], "tensors carry nothing"
    assert maps_in_memory() == 0


@torch.no_grad()
def test_kept_features_keep_no_maps():
    model, x, _ = alive("resnet")
    features = model.forward_intermediates(x, intermediates_only=True)
    assert len(features) == 5
    assert maps_in_memory() == 0
    model.forward_intermediates(x, indices=[2], stop_early=True)
    assert maps_in_memory() == 0


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_a_copy_runs_inside_a_forward_of_its_original(name, pickled):
    """As a teacher does in a hook of its student: each forward has a store of its own."""
    model, x, (first, _) = alive(name)
    if pickled:
        model = pickle.loads(pickle.dumps(model))
    teacher = copy.deepcopy(model)
    expected = model(x)
    part = model.get_submodule(first)
    taught = []
    part.register_forward_hook(lambda module, args, y: taught.append(teacher(x)) or y * 1.0)
    assert_close(model(x), expected)
    assert_close(taught[0], expected)


def test_two_forwards_before_one_backward_with_checkpoints():
    """Each block is run again with the maps of its own forward."""
    model, x, _ = alive("vit")
    model.train()

    def gradients():
        return gradients_of(torch.cat([model(x), model(x.flip(3))]), model)

    expected = gradients()
    model.set_grad_checkpointing()
    assert_close(gradients(), expected)


def test_checkpoints_around_several_stages():
    model, x, _ = alive("resnet")
    two = nn.Sequential(model.layer2, model.layer3)

    def gradients(middle):
        z = middle(model.layer1(stem(model, x)))
        return gradients_of(model.layer4(z), model)

    expected = gradients(two)
    assert_close(gradients(lambda z: checkpoint(two, z, use_reentrant=False)), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_tensor_of_another_forward_brings_no_maps_of_it(name):
    """An output kept from one image replaces that of another: the maps are the running forward's, as with a copy."""
    model, x, (first, _) = alive(name)
    model.requires_grad_(False)
    other = x.flip(0) if name == "bert" else x.flip(3)
    kept = []
    hook = model.get_submodule(first).register_forward_hook(lambda _, args, y: kept.append(y))
    run(model, other)
    hook.remove()
    outputs = []
    for replacement in (kept[0].clone(), kept[0]):
        hook = model.get_submodule(first).register_forward_hook(lambda *_, y=replacement: y)
        outputs.append(run(model, x))
        hook.remove()
    assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize(
    "kind, options, needs",
    [
        (None, {"token_conv": "paper"}, "token_conv needs the patches"),
        ("conv2d", {}, r"needs the patches' \(height, width\)"),
    ],
)
def test_patches_are_found_in_a_checkpoint_and_not_by_tokens_outside_a_forward(
    kind, options, needs
):
    model = evolve(create("vit_tiny_patch16_224"), kind, **options)
    expected = gradients_of(model(images()), model)
    again = checkpoint(model, images(), use_reentrant=False)
    assert_close(gradients_of(again, model), expected)
    with refused(needs, ValueError):
        model.blocks(torch.randn(2, 17, 48))


def threaded(name):
    """Return a network, and inputs of several sizes."""
    if name == "Bart":
        model = evolve(huggingface.create(name), "ea")
        return model, [torch.randint(3, 50, (2, length)) for length in (5, 9, 12, 7)]
    plain = timm.create_model("vit_small_patch16_dinov3", **TINY, dynamic_img_size=True)
    model = evolve(plain.eval(), "conv2d", token_conv="paper", value_residual="paper")
    return model, [images(32, width) for width in (16, 32, 48, 64)]


@pytest.mark.parametrize("name", ["Bart", "dinov3"])
def test_threads_share_a_network(name):
    model, inputs = threaded(name)
    call = torch.no_grad()(partial(run, stirred(model, 0.3)))
    expected = [call(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert_close(list(pool.map(call, 10 * inputs)), 10 * expected)

"""Learnable gates in a run, fine-tuning from other weights, and frozen parts of a network."""

import pytest
import safetensors.torch
import timm
import torch

import ea_vision  # noqa: F401
from ea_vision.engine import run_folder, train_cifar, train_imagenet
from ea_vision.engine.classification import ClassificationConfig
from ea_vision.engine.optimizer import build_optimizer
from ea_vision.layers import learnable_gates
from ea_vision.zoo.preparation import image_statistics
from experiments.learning_curves import read_metrics
from tests.engine import runner
from tests.engine.runner import assert_equal

WIDTHS = {"patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 3}
NARROW = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}
VIT = (
    "--recipe none --model ea_vit_tiny_patch16_224 --opt adamw --lr 1e-3 --model-kwargs "
    "patch_size=8 embed_dim=12 depth=3 num_heads=3"
)
ONCE = "--recipe none --epochs 1"


def gates_of(folder):
    """Return the columns of learnable gates, named as in the state dict."""
    return {name: column for name, column in read_metrics(folder).items() if "." in name}


def test_gates_are_logged_and_exported(arguments, folder, tmp_path):
    train_cifar.main(arguments(folder, VIT, "--gate-lr 30 --model-ema-decay 0.9"))
    gates = gates_of(folder)
    names = []
    for block in ("blocks.1", "blocks.2"):
        names += [f"{block}.attn.evolution.alpha", f"{block}.attn.evolution.beta"]
    assert list(gates) == names
    weights = runner.weights_of(folder)
    best = run_folder.read_results(folder)["test_best"]["epoch"]
    assert weights[names[1]].item() == pytest.approx(gates[names[1]][best - 1], rel=1e-5)
    assert all(values[1] != 0 for values in gates.values())
    constants = tmp_path / "constants"
    train_cifar.main(arguments(constants, VIT, "--model-kwargs alpha=0.5"))
    assert not gates_of(constants)


def test_layer_decay_is_timms_and_multiplies_the_rate_of_the_shares():
    model = timm.create_model("ea_vit_tiny_patch16_224", img_size=16, **WIDTHS)
    gates = {id(gate) for gate in learnable_gates(model).values()}

    def settings(optimizer, gate_lr=1):
        """Return rate and decay of each parameter, without the gates' own factor."""
        rates = {}
        decays = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                rates[id(p)] = group["lr_scale"] / (gate_lr if id(p) in gates else 1)
                decays[id(p)] = group["weight_decay"]
        return rates, decays

    options = {"lr": 0.1, "weight_decay": 0.05, "layer_decay": 0.5}
    rates, decays = settings(timm.optim.create_optimizer_v2(model, "adamw", **options))
    assert len(set(rates.values())) > 4
    for gate_lr in (1, 30):
        config = ClassificationConfig(opt="adamw", gate_lr=gate_lr, **options)
        optimizer = build_optimizer(config, model, 8)
        assert settings(optimizer, gate_lr) == (pytest.approx(rates), decays)
        # the first group's rate, which is logged, is lr
        assert optimizer.param_groups[0]["lr_scale"] == 1


def test_pretrained_path_is_the_start_of_a_run(arguments, tmp_path, capsys, refusal):
    """A plain network's weights, from a run folder, in an evolving one; other classes, files and models."""
    plain = tmp_path / "plain"
    train_cifar.main(arguments(plain, VIT, "--model vit_tiny_patch16_224"))
    weights = runner.weights_of(plain)

    def save(name, state):
        path = tmp_path / f"{name}.safetensors"
        safetensors.torch.save_file(state, path)
        return path

    incomplete = dict(weights)
    del incomplete["blocks.1.mlp.fc1.weight"]
    save("lacking", incomplete)
    save("spoilt", {**weights, "norm.weight": torch.full((12,), torch.nan)})
    head = {"head.weight": torch.ones(7, 12), "head.bias": torch.ones(7)}
    seven = save("seven", {**weights, **head})
    (tmp_path / "text.safetensors").write_bytes(b"no weights")
    capsys.readouterr()
    results = []
    for source, changed in ((plain, set()), (seven, set(head))):
        folder = tmp_path / f"from_{source.stem}"
        train_cifar.main(arguments(folder, VIT, f"--pretrained-path {source} --lr 0"))
        begun = runner.weights_of(folder)
        for name, value in weights.items():
            assert torch.equal(begun[name], value) == (name not in changed)
        assert begun["head.weight"].shape == (3, 12)
        results.append(run_folder.read_results(folder)["test_best"]["top1"])
    # no class's score has changed
    assert results[0] == run_folder.read_results(plain)["test_best"]["top1"]
    assert "head.weight of" in capsys.readouterr().out
    for name, message in (
        ("lacking", "blocks.1.mlp.fc1.weight"),
        ("spoilt", "must be finite"),
        ("text", "cannot be read"),
        ("missing", "missing.safetensors does not exist"),
    ):
        more = f"--pretrained-path {tmp_path}/{name}.safetensors"
        assert message in refusal(arguments(tmp_path / "bad", VIT, more))


@pytest.mark.parametrize(
    "recipe, model, plain, sizes, name, zero",
    [
        (
            "finetune_vit",
            "vit_tiny_patch16_224",
            "vit_tiny_patch16_224",
            WIDTHS,
            "blocks.2.mlp.fc1.weight",
            "head.bias",
        ),
        (
            "finetune_ea_vit",
            "ea_vit_tiny_patch16_224",
            "vit_tiny_patch16_224",
            WIDTHS,
            "blocks.2.mlp.fc1.weight",
            "blocks.2.attn.evolution.alpha",
        ),
        (
            "finetune_resnet",
            "ea_aa_resnet34",
            "resnet34",
            NARROW,
            "layer3.0.conv1.conv.weight",
            "layer3.0.conv1.proj.weight",
        ),
    ],
)
def test_fine_tuning_by_recipe_begins_with_timms_weights_and_reloads(
    imagenet, data, folder, monkeypatch, recipe, model, plain, sizes, name, zero
):
    """The first weight of a name is a pretrained one and hardly moves; the second begins at zero and learns."""
    state = timm.create_model(plain, **sizes).state_dict()
    calls = set()

    def from_hub(model_id, **_):
        calls.add(model_id)
        return state

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", from_hub)
    keywords = [f"{key}={value}" for key, value in sizes.items()]
    options = "--pretrained --epochs 1 --lr 1e-6 --img-size 32 --eval-resize 36 --workers 0"
    argv = imagenet(folder, f"--recipe {recipe} --model {model} --data-dir {data}", options)
    train_imagenet.main([*argv, "--model-kwargs", *keywords])
    assert calls == {timm.get_pretrained_cfg(plain).hf_hub_id}
    trained = runner.weights_of(folder)
    before = state[name.replace("conv1.conv.", "conv1.")]
    torch.testing.assert_close(trained[name], before, atol=1e-4, rtol=0)
    assert trained[zero].any()
    kwargs = run_folder.read_config(folder)[1]["model_kwargs"]
    again = timm.create_model(model, checkpoint_path=folder / "model.safetensors", **kwargs)
    assert again.num_classes == 3
    assert_equal(again.state_dict(), trained)


@pytest.mark.parametrize(
    "more, trained, std, std_of_channels",
    [
        ("--linear-probe", {"fc.weight", "fc.bias"}, "0.4 0.5 0.6", [0.4, 0.5, 0.6]),
        (
            "--freeze conv1,bn1,layer1",
            {"layer4.0.conv1.weight", "layer4.0.bn1.running_mean"},
            "0.5",
            [0.5, 0.5, 0.5],
        ),
    ],
)
def test_frozen_parts_stay_as_they_began_statistics_included(
    arguments, tmp_path, more, trained, std, std_of_channels
):
    first = tmp_path / "first"
    second = tmp_path / "second"
    train_cifar.main(arguments(first, ONCE, f"--mean 0.1 0.2 0.3 --std {std}"))
    argv = arguments(second, ONCE, f"--pretrained-path {first}", more)
    train_cifar.main(argv)
    begun = runner.weights_of(first)
    changed = set()
    for name, value in runner.weights_of(second).items():
        if not torch.equal(value, begun[name]):
            changed.add(name)
            assert not name.startswith(("conv1.", "bn1.", "layer1."))
    assert trained <= changed
    assert changed == trained or "freeze" in more
    _, about = run_folder.read_config(second)
    # of the first run
    assert about["mean"] == [0.1, 0.2, 0.3]
    assert about["std"] == std_of_channels
    statistics = image_statistics(ea_vision.load(str(second)))
    assert statistics == ((0.1, 0.2, 0.3), tuple(std_of_channels))
    train_cifar.main(argv)  # finds it complete

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

WIDTHS = {"patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 3}
SMALL = {**WIDTHS, "img_size": 16, "num_classes": 3}
ONCE = "--recipe none --epochs 1"
KWARGS = " ".join(f"{key}={value}" for key, value in WIDTHS.items())
NARROW = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}


def network(name="ea_vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **options})


def arguments(data, output, *more, model="ea_vit_tiny_patch16_224"):
    """Two epochs of five updates of eight images."""
    return runner.words(
        f"--recipe none --model {model} --model-kwargs {KWARGS}",
        f"--img-size 16 --dataset folder --data-dir {data} --output {output}",
        "--epochs 2 --batch-size 8 --opt adamw --lr 1e-3 --device cpu",
        *more,
    )


def gates_of(folder):
    """Return the columns of learnable gates, named as in the state dict."""
    return {name: column for name, column in read_metrics(folder).items() if "." in name}


def test_gates_are_logged_and_exported(data, tmp_path):
    folder = tmp_path / "learnt"
    assert train_cifar.main(arguments(data, folder, "--gate-lr 30 --model-ema-decay 0.9")) == 0
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
    assert train_cifar.main(arguments(data, constants, "--model-kwargs alpha=0.5")) == 0
    assert not gates_of(constants)


def test_layer_decay_is_timms_and_multiplies_the_rate_of_the_shares():
    model = network()
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


def test_pretrained_path_is_the_start_of_a_run(data, tmp_path, capsys, refusal):
    """A plain network's weights, from a run folder, in an evolving one; other classes, files and models."""
    plain = tmp_path / "plain"
    assert train_cifar.main(arguments(data, plain, model="vit_tiny_patch16_224")) == 0
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
        assert train_cifar.main(arguments(data, folder, f"--pretrained-path {source} --lr 0")) == 0
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
        argv = arguments(data, tmp_path / "bad", f"--pretrained-path {tmp_path}/{name}.safetensors")
        assert message in refusal(argv)


@pytest.mark.parametrize("recipe", ["finetune_vit", "finetune_ea_vit"])
def test_fine_tuning_by_recipe_from_pretrained_weights(data, recipe, tmp_path, monkeypatch):
    """Uses a file with 1000 classes in place of timm's weights on the hub."""
    model = "vit_tiny_patch16_224" if recipe == "finetune_vit" else "ea_vit_tiny_patch16_224"
    file = tmp_path / "hub.safetensors"
    state = network("vit_tiny_patch16_224", num_classes=1000).state_dict()
    safetensors.torch.save_file(state, file)
    create = timm.create_model
    overlay = {"file": str(file), "custom_load": False}

    def from_file(name, pretrained=False, **kwargs):
        assert pretrained
        return create(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)

    monkeypatch.setattr(timm, "create_model", from_file)
    argv = runner.words(
        f"--recipe {recipe} --model {model} --pretrained --model-kwargs {KWARGS}",
        f"--data-dir {data} --img-size 16 --eval-resize 18 --epochs 1 --batch-size 8 --workers 0",
        f"--lr 1e-6 --output {tmp_path / 'run'} --device cpu",
    )
    assert train_imagenet.main(argv) == 0
    begun = runner.weights_of(tmp_path / "run")
    assert begun["head.weight"].shape[0] == 3
    name = "blocks.2.mlp.fc1.weight"
    torch.testing.assert_close(begun[name], state[name], atol=1e-4, rtol=0)


def test_fine_tuning_a_resnet_by_recipe_begins_as_the_plain_one(data, tmp_path, monkeypatch):
    plain = timm.create_model("resnet34", **NARROW)
    calls = []

    def from_hub(model_id, **_):
        calls.append(model_id)
        return plain.state_dict()

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", from_hub)
    argv = runner.words(
        "--recipe finetune_resnet --model ea_aa_resnet34 --pretrained",
        "--model-kwargs layers=[1,1,1,1] channels=[8,8,16,16]",
        f"--data-dir {data} --img-size 32 --eval-resize 36 --epochs 1 --batch-size 8 --workers 0",
        f"--lr 1e-6 --output {tmp_path / 'run'} --device cpu",
    )
    assert train_imagenet.main(argv) == 0
    assert set(calls) == {timm.get_pretrained_cfg("resnet34").hf_hub_id}
    trained = runner.weights_of(tmp_path / "run")
    weight = trained["layer3.0.conv1.conv.weight"]
    before = plain.state_dict()["layer3.0.conv1.weight"]
    torch.testing.assert_close(weight, before, atol=1e-4, rtol=0)
    assert trained["layer3.0.conv1.proj.weight"].any()  # has begun to learn
    path = tmp_path / "run" / "model.safetensors"
    options = {"num_classes": 3, "fusion": "add", **NARROW}
    again = timm.create_model("ea_aa_resnet34", checkpoint_path=path, **options)
    assert torch.equal(again.fc.weight, trained["fc.weight"])


@pytest.mark.parametrize(
    "more, trained, std",
    [
        ("--linear-probe", {"fc.weight", "fc.bias"}, "0.4 0.5 0.6"),
        (
            "--freeze conv1,bn1,layer1",
            {"layer4.0.conv1.weight", "layer4.0.bn1.running_mean"},
            "0.5",  # of each channel
        ),
    ],
)
def test_frozen_parts_stay_as_they_began_statistics_included(data, tmp_path, more, trained, std):
    first = tmp_path / "first"
    second = tmp_path / "second"
    statistics = f"--mean 0.1 0.2 0.3 --std {std}"
    std_of_channels = {"0.5": (0.5, 0.5, 0.5), "0.4 0.5 0.6": (0.4, 0.5, 0.6)}[std]
    assert train_cifar.main(runner.arguments(data, first, ONCE, statistics)) == 0
    argv = runner.arguments(data, second, ONCE, f"--pretrained-path {first}", more)
    assert train_cifar.main(argv) == 0
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
    assert about["std"] == [*std_of_channels]
    assert image_statistics(ea_vision.load(str(second))) == ((0.1, 0.2, 0.3), std_of_channels)
    assert train_cifar.main(argv) == 0, "the same command finds it complete"

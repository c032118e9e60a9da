"""Options: defaults < recipe < command line, and errors that help."""

import argparse
import dataclasses
import re

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ea_vision.__main__ import main
from ea_vision.base.errors import UsageError
from ea_vision.detection.train import CocoDetection
from ea_vision.engine import run_folder, train_cifar, train_imagenet
from ea_vision.engine.config import load_recipe, make_parser, parse, resolve
from ea_vision.engine.train_cifar import EXAMPLES, CifarConfig, SmallImages
from ea_vision.engine.train_imagenet import ClassFolders, ImageNetConfig
from ea_vision.zoo.loaded import load_model
from experiments import timm_options
from tests.process import ROOT
from tests.refused import refused

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def parsed(line="", cls=CifarConfig):
    return resolve(cls, parse(make_parser(cls, "", EXAMPLES), line.split()))


def test_command_line_over_recipe_over_defaults(recipe):
    path = recipe("lr: 1e-3\nepochs: 7\nmodel_kwargs: {alpha: 0.3, drop_rate: 0.1}\n")
    config = parsed(f"--recipe {path} --epochs 9 --model-kwargs alpha=0.7 beta=0")
    assert config.lr == 0.001
    assert config.epochs == 9
    assert config.momentum == CifarConfig().momentum
    assert config.model_kwargs == {"alpha": 0.7, "beta": 0, "drop_rate": 0.1}
    # only what the recipe alone asks for may be left out
    assert config.optional_kwargs == {"drop_rate"}


def test_keywords_of_a_subclass_are_defaults_of_inherited_options():
    with pytest.raises(TypeError, match="no option 'batchsize'; did you mean batch_size"):
        type("Mine", (CifarConfig,), {}, batchsize=8)


def test_a_warmup_longer_than_the_run_is_refused():
    """Also that of the recipe, here 5 epochs; the error names the option that sets it."""
    for argv in ("--epochs 1", "--epochs 1 --warmup-epochs 5", "--epochs 4.9"):
        with refused("at most the [0-9.]+ epochs .* got 5; --warmup-epochs"):
            parsed(argv, ImageNetConfig)
    assert parsed("--epochs 5", ImageNetConfig).warmup_epochs == 5
    assert parsed("--epochs 1 --warmup-epochs 20%", ImageNetConfig).warmup_updates(100) == 20


@pytest.mark.parametrize(
    "place, message",
    [
        ("{root}/no", "data folder {root}/no must have train/ .*; it does not exist"),
        ("{root}/train", "data folder {root}/train must have train/ "),
        ("", "--dataset folder needs --data-dir"),
    ],
)
def test_a_wrong_folder_of_small_images_is_told_before_a_job_begins(photos, place, message):
    words = ["--check-options", "--dataset", "folder", "--data-dir"]
    assert train_cifar.main([*words, str(photos)]) == 0
    with refused(message.format(root=photos)):
        train_cifar.main([*words, place.format(root=photos)])


@pytest.mark.parametrize(
    "line, message",
    [
        ("--model ea_vit", "unknown model 'ea_vit'"),
        ("--opt sdg", "unknown optimiser 'sdg'; did you mean sgd"),
        ("--device gpu", "--device must be auto, cpu, cuda"),
        ("--pretrained-path best.safetensors", "--pretrained-path best.safetensors does not exist"),
        ("--resume runs/last", "--resume must be auto, none or a path, and runs/last does not"),
    ],
)
def test_a_wrong_name_is_told_before_data_is_read(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_imagenet.ClassFolders, "__init__", None)
    for check in ([], ["--check-options"]):
        with refused(re.escape(message)):
            train_imagenet.main([*line.split(), *check])


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "--data-dir {root}/no",
            "data folder {root}/no must have train/ or train.tar; it does not exist",
        ),
        ("--val-split dev", "validation images: {root} has neither dev nor"),
        ("--dataset wds/imagenet", "wds/imagenet"),
        ("--aa rand-m9-mstd0.5-foo", "foo"),
        ("--aa rand-m9-mstd0.5-x3", "rand-m9-mstd0.5-x3"),
        ("--freeze layer9", "layer9"),
        ("--model-kwargs fusion=ad", "fusion=ad"),
        ("--model vit_tiny_patch16_224 --model-kwargs num_heads=5", "num_heads=5"),
        ("--warmup-epochs 5 --epochs 3", "got 5"),
        ("--resume {empty}", "no checkpoint"),
        pytest.param("--device cuda", "cuda", marks=NO_CUDA),
    ],
)
def test_what_is_wrong_is_told_before_a_job_begins(photos, tmp_path, line, message):
    """--check-options reports it, so slurm/imagenet.sbatch does, and not each restart of torchrun."""
    line = "--check-options --data-dir {root} " + line
    with refused(re.escape(message.format(root=photos))):
        train_imagenet.main(line.format(root=photos, empty=tmp_path).split())


def test_options_that_fit_pass_the_check(photos):
    for line in (
        "",
        "--aa rand-m9-mstd0.5-inc1",
        "--aa rand-mstd1-tweights",
        "--aa original",
        "--aa ta_wide",
        "--freeze layer1,layer2.0 --model-kwargs fusion=add --grad-checkpointing",
        "--model convit_tiny",
    ):
        train_imagenet.main(["--check-options", "--data-dir", str(photos), *line.split()])


def test_a_run_needs_its_weights_until_it_is_complete(tmp_path):
    line = f"--check-options --dataset digits --output {tmp_path} --pretrained-path {tmp_path}/gone.pth"
    for file in ("", run_folder.CONFIG):
        (tmp_path / file).touch()
        with refused(r"gone\.pth does not exist"):
            train_cifar.main(line.split())
    (tmp_path / run_folder.RESULTS).touch()
    train_cifar.main(line.split())


@pytest.mark.parametrize(
    "line, message",
    [
        ("--lrr 1", "--lr"),
        ("--recipe pa_cifar1", "pa_cifar10"),
        ("--epochs ten", "epochs must be of type float, got 'ten'"),
        ("--batch-size 1.5", "batch_size must be of type int"),
        ("--lr nan", "lr must be a finite number, got nan"),
        (
            "--dataset cifar",
            "dataset must be one of auto, digits, cifar10, cifar100, folder, got 'cifar'",
        ),
        ("--lr 0.1 --min-lr 0.2", "min_lr must be at most lr"),
        ("--model-kwargs alpha", "key=value"),
        ("--lr", "expected one argument"),
        ("stray", "unknown argument 'stray'"),
        ("tests", "unknown argument 'tests'; did you mean --data-dir tests?"),
        ("--learning-rate 1", "unknown argument '--learning-rate'; did you mean --lr?"),
        (
            "--dataset digits --data-dir photos",
            "data_dir must be empty, got photos (--dataset folder reads it)",
        ),
        ("--remode const", "remode needs reprob, got const without it"),
        ("--mean 0.5 0.5 0.5", "mean needs std"),
        (
            "--mean 0.5 0.5 --std 0.5 0.5",
            "mean must be three numbers, one per channel, got [0.5, 0.5]",
        ),
        ("--mean 0.5 --std 0", "std must be three numbers, one per channel, above 0, got [0.0]"),
        (
            "--mean 0.5 0.5 0.5 --std 1 0 1",
            "std must be three numbers, one per channel, above 0, got [1.0, 0.0, 1.0]",
        ),
        (
            "--crop-padding 32 --crop-padding-mode reflect",
            "crop_padding must be less than img_size",
        ),
        ("--gate-lr -1", "gate_lr must be at least 0"),
        (
            "--warmup-epochs 120%",
            "warmup_epochs must be a number, or a percentage up to 100%, got '120%'",
        ),
        (
            "--compile --compile-mode reduce-overhead --grad-accum-steps 2",
            "compile_mode reduce-overhead needs updates of one batch per process, "
            "because each replay of a CUDA graph overwrites the",
        ),
    ],
)
def test_bad_options_are_named(line, message):
    with refused(re.escape(message)):
        parsed(line)


@pytest.mark.parametrize(
    "line, message",
    [
        ("--bce-target-thresh 0.2", "bce_target_thresh needs bce_loss"),
        ("--first-img-size 160", "first_img_size needs grow_epochs"),
        ("--grow-epochs 1 2", "grow_epochs needs first_img_size"),
        (
            "--first-img-size 256 --grow-epochs 1 2",
            "first_img_size must be 8 to img_size (224), got 256",
        ),
        (
            "--first-img-size 160 --grow-epochs 3 2",
            "grow_epochs must be two epochs that do not fall",
        ),
        ("--eval-img-size 300", "eval_resize must be at least eval_img_size (300), got 256"),
    ],
)
def test_bad_options_of_the_imagenet_trainer_are_named(line, message):
    with refused(re.escape(message)):
        parsed(line, ImageNetConfig)


@pytest.mark.parametrize(
    "text, message",
    [
        ("epoch: 3", "unknown option 'epoch'; did you mean epochs"),
        ("- 1", "must be a YAML mapping"),
        ("a: [", "not valid YAML"),
        ("lr: 0.1\nepochs: 3\nlr: 0.2", "not valid YAML: lr stands twice"),
        ("model_kwargs: {alpha: 0.1, alpha: 0.2}", "not valid YAML: alpha stands twice"),
        ("model_kwargs: !!map [1]", "not valid YAML: expected a mapping"),
        ("on: {1: 2, '1': 3}", "unknown option True"),
        ("compile: maybe", "compile must be of type bool"),
        ("amp: off", "amp must be one of none, bfloat16, float16, got False"),
        ("base:", "base must be a recipe, got None"),
        ("base: [fast]", r"base must be a recipe, got \['fast'\]"),
        ("3: 1", "unknown option 3"),
        ("model_kwargs: [alpha]", r"model_kwargs must be a mapping, got \['alpha'\]"),
        ("opt_kwargs: nesterov", "opt_kwargs must be a mapping, got 'nesterov'"),
        ("epochs: ten\nwarmup_epochs: 5", "epochs must be of type float, got 'ten'"),
        ("epochs: 10\nwarmup_epochs: [5]", "warmup_epochs must be a number, or a percentage"),
        ("epochs: 10\nwarmup_epochs:", "warmup_epochs must be a number, or a percentage"),
        (
            "sched: multistep\ndecay_milestones: '30'",
            "decay_milestones must be of type list, got '30'",
        ),
        ("mean: '123'\nstd: '123'", "mean must be of type list, got '123'"),
        ("decay_milestones: 0", "decay_milestones must be of type list, got 0"),
    ],
)
def test_bad_recipes_are_named(recipe, text, message):
    with refused(message):
        parsed(f"--recipe {recipe(text)}")


def test_a_key_of_a_recipe_without_a_value_is_empty(recipe):
    """And not the text none: a folder of this name, or a project of Weights & Biases."""
    names = ("output", "data_dir", "pretrained_path", "wandb", "freeze")
    path = recipe("\n".join(f"{name}:" for name in names))
    config = parsed(f"--recipe {path}")
    assert {getattr(config, name) for name in names} == {""}
    assert parsed(f"--recipe {recipe('amp:')}").amp == "none"


def test_a_runs_config_is_a_recipe(recipe):
    config = dataclasses.asdict(parsed("--lr 0.07 --decay-milestones 3 5 --output somewhere"))
    path = recipe(yaml.safe_dump({**config, "about": {"seconds": 3}}))
    again = dataclasses.asdict(parsed(f"--recipe {path}"))
    # the place of the old run is not taken over
    assert again == {**config, "recipe": str(path), "output": ""}


def test_a_recipe_says_what_differs_from_its_base(recipe):
    text = "base: pa_cifar10\nlr: 0.3\nmodel_kwargs: {alpha: 0.3, ff_drop_rate: 0.1}\n"
    first = recipe(text, "first")
    second = recipe(f"base: {first}\nepochs: 9\nmodel_kwargs: {{alpha: 0.4}}\n", "second")
    papers = load_recipe("pa_cifar10")
    kwargs = {**papers["model_kwargs"], "alpha": 0.4, "ff_drop_rate": 0.1}
    options = {**papers, "lr": 0.3, "epochs": 9, "model_kwargs": kwargs}
    assert load_recipe(str(second)) == options
    for base, message in (
        (second, "is its own base: .*second.yaml -> .*first.yaml -> .*second.yaml"),
        ("pa_cifar1", "no recipe 'pa_cifar1': did you mean pa_cifar10"),
    ):
        recipe(f"base: {base}\n", "first")
        with refused(message):
            load_recipe(str(second))


@pytest.mark.parametrize(
    "command, module",
    [
        ("train-cifar", SmallImages),
        ("train-imagenet", ClassFolders),
        ("train-detection", CocoDetection),
    ],
)
def test_help_fits_one_screen(command, module, capsys):
    """--help-all lists every option with its default, and begins with the ten options of --help."""

    def help_by(flag):
        with pytest.raises(SystemExit):
            main([command, flag])
        return capsys.readouterr().out

    short = help_by("--help")
    whole = help_by("--help-all")
    assert len(short.splitlines()) <= 45
    first = short.partition("used first:")[2].partition("instead of training:")[0]
    assert first in whole
    flags = re.findall(r"^  (--[\w-]+)", first, re.MULTILINE)
    assert len(flags) == 10
    assert {"--model", "--data-dir", "--epochs", "--lr"} <= set(flags)
    for flag in ("--check-options", "--clip-grad"):
        assert flag in whole
        assert flag not in short
    assert "--lr X" in whole
    text = " ".join(whole.split())
    assert text.count("(default: ") >= len(dataclasses.fields(module.options))
    # of the default recipe
    assert f"lr_base) (default: {resolve(module.options, {}).lr})" in text
    folder = re.sub(r"{(\w+)}", lambda match: match[1].upper(), module.default_output)
    assert f"own folder; empty: {folder} " in text


def test_a_folder_that_is_given_is_read():
    """--data-dir without --dataset is a folder of images, and never ignored."""
    assert parsed("--data-dir photos").dataset == "folder"
    assert parsed().dataset == "digits"
    assert parsed("--data-dir d --dataset cifar10").dataset == "cifar10"


def test_an_empty_name_is_neither_a_training_nor_the_working_directory():
    with refused("--evaluate needs a run folder, a file of weights or a model, got an empty"):
        train_cifar.main(["--evaluate", ""])
    with refused("run folder or a file is required, got an empty text"):
        load_model("")


def test_amp_alone_is_bfloat16():
    assert parsed("--amp").amp == "bfloat16"
    assert parsed("--amp --channels-last").amp == "bfloat16"
    assert parsed("--amp none").amp == "none"


def test_options_younger_than_a_checkpoint_had_their_defaults_and_those_that_are_gone_are_named():
    config = resolve(CifarConfig, {"momentum": 0.8})
    saved = dataclasses.asdict(config) | {"clip_mode": "agc"}
    del saved["momentum"], saved["clip_grad"]
    assert config.differences(saved) == {
        "momentum": "momentum was 0.9, got 0.8",
        "clip_mode": "clip_mode was 'agc', an option that is gone",
    }


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=st.text(max_size=200))
def test_recipes_of_any_text(recipe, text):
    try:
        assert isinstance(load_recipe(str(recipe(text))), dict)
    except UsageError as error:
        assert str(error)


def test_the_table_of_timms_options_says_what_there_is():
    """experiments/timm_options.py writes the page for timm's parser; here for one with the page's options. argparse
    lists its options under a private name alone."""
    page = (ROOT / "experiments" / "timm_options.md").read_text(encoding="utf-8")
    timms = argparse.ArgumentParser()
    for flag in re.findall(r"(?:^\| |: |, )`(--[\w-]+)`", page, re.MULTILINE):
        timms.add_argument(flag)
    assert len(timms._actions) > 100
    assert timm_options.section(timms) in page
    ours = set(make_parser(ImageNetConfig, "", "")._option_string_actions)
    for here in (*timm_options.UNLIKE.values(), *timm_options.OTHERWISE.values()):
        assert set(re.findall(r"--[a-z-]+", here)) - {"--lr-base"} <= ours, here

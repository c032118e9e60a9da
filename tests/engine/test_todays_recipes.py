"""Modern ImageNet training: every recipe at a small scale with both loaders, and the parts of the recipes.

Private name: `_batch_loss` is what a trainer defines for its task.
"""

import signal
from functools import partial

import pytest
import timm
import torch
from torchvision.transforms import InterpolationMode, TrivialAugmentWide

import ea_vision  # noqa: F401
from ea_vision.data import write_ffcv
from ea_vision.data.imagenet import train_transform
from ea_vision.engine import run_folder, train_imagenet
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.train_imagenet import ImageNetConfig
from experiments.learning_curves import read_metrics
from tests.data.photos import make_photos
from tests.engine import runner
from tests.engine.runner import make_trainer, same_result
from tests.slow import FFCV, needs_ffcv

# A narrow network with position tables whose maps are of a sixteenth of the image: 6, 4 and 2 pixels here.
NARROW = "--model ea_aa_resnet34 --model-kwargs layers=[1,1,1,1] channels=[8,16,16,16]"
SIZES = "--img-size 32 --eval-img-size 48 --eval-resize 51"
GROWING = "--first-img-size 32 --img-size 64 --grow-epochs 0 1 --eval-img-size 80 --eval-resize 92"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = make_photos(tmp_path_factory.mktemp("photos"), side=72)
    if FFCV:
        for split in ("train", "validation"):
            options = f"--data-dir {root} --split {split} --out {root / split}.beton --workers 1"
            write_ffcv.main(runner.words(options, "--eval-img-size 80 --eval-resize 92"))
    return root


@pytest.mark.parametrize(
    "recipe, sizes, data",
    [
        ("rsb_a3", SIZES, "--data-dir {0}"),
        ("rsb_a1", SIZES, "--data-dir {0}"),
        ("ffcv_88", GROWING, "--data-dir {0}"),
        pytest.param(
            "ffcv_16",
            GROWING,
            "--data-dir= --train-beton {0}/train.beton --val-beton {0}/validation.beton",
            marks=needs_ffcv,
        ),
    ],
)
def test_each_recipe_trains_through_all_loaders(
    imagenet, photos, folder, monkeypatch, recipe, sizes, data
):
    """In the second of two epochs of five updates, images are larger if the recipe's grow."""
    seen = set()
    batch_loss = ClassificationTrainer._batch_loss

    def watched(trainer, images, targets):
        seen.add((trainer.progress.epoch, tuple(images.shape[-2:])))
        return batch_loss(trainer, images, targets)

    monkeypatch.setattr(ClassificationTrainer, "_batch_loss", watched)
    train_imagenet.main(
        imagenet(folder, f"--recipe {recipe}", NARROW, sizes, data.format(photos), "--workers 0")
    )
    metrics = read_metrics(folder)
    assert metrics["step"] == [5, 10]
    assert all(0 < loss < 10 for loss in metrics["train_loss"])
    largest = (64, 64) if sizes == GROWING else (32, 32)
    assert seen == {(0, (32, 32)), (1, largest)}
    about = run_folder.read_config(folder)[1]["model_kwargs"]
    assert about.get("drop_path_rate") == (0.05 if recipe == "rsb_a1" else None)


@pytest.mark.slow
def test_growing_images_and_what_follows_them_survive_a_kill(imagenet, tmp_path):
    """32, 64 and 96 pixels; killed inside the second epoch, stopped inside the third."""
    train = partial(runner.train, main=train_imagenet.main)
    sizes = (
        "--first-img-size 32 --img-size 96 --grow-epochs 0 2 --eval-img-size 96 --eval-resize 100"
    )
    options = ["--recipe rsb_a2 --epochs 3 --workers 0 --model-ema-decay 0.9", NARROW, sizes]
    train(imagenet(tmp_path / "whole", *options))
    broken = imagenet(tmp_path / "broken", *options)
    for update, number in ((8, signal.SIGKILL), (6, signal.SIGTERM)):
        runner.stopped(broken, update, number, main=train_imagenet.main)
    train(broken)
    same_result(tmp_path / "broken", tmp_path / "whole")
    steps = [int(row["step"]) for row in runner.rows_of(tmp_path / "broken" / "speed.csv")]
    assert sorted(set(steps)) == steps, "no row twice"
    assert steps[-1] == 15


def test_position_tables_follow_the_images():
    """Offsets that no map has reached yet are copies of the farthest offset that one has reached."""
    narrow = {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "img_size": 96}
    model = timm.create_model("ea_aa_resnet34", zero_init_last=False, **narrow)
    table = model.layer2[0].conv1.height_rel
    before = table.detach().clone()
    assert len(table) == 11  # a map of 6x6
    model.fill_offsets_beyond(64)  # 4x4: offsets -3 to 3 are trained
    filled = before[[2, 2, *range(2, 9), 8, 8]]
    assert torch.equal(table, filled)
    output = model.train()(torch.randn(2, 3, 64, 64))
    output.sum().backward()
    assert not table.grad[:2].any()
    assert table.grad[2:9].any()
    model.fill_offsets_beyond(96)
    assert model.layer2[0].conv1.height_rel is table
    assert torch.equal(table, filled)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_binary_cross_entropy(tmp_path, mixed, threshold):
    """The mean, over images and classes, of the yes-or-no entropies of smoothed, mixed, thresholded targets."""
    model = timm.create_model("test_resnet", num_classes=3).eval()
    options = {"bce_loss": True, "bce_target_thresh": threshold, "smoothing": 0.1}
    options |= {"batch_size": 8, "mixup": 0.4 if mixed else 0.0}
    trainer = make_trainer(tmp_path, model, schema=ImageNetConfig, **options)
    images = torch.randn(8, 3, 32, 32)
    targets = torch.arange(8) % 3
    soft = 0.9 * torch.eye(3)[targets] + 0.1 / 3
    if mixed:
        soft = 0.75 * soft + 0.25 * soft.flip(0)
        trainer.mix = lambda images, targets, mixed=soft: (images, mixed)
    if threshold:
        soft = (soft > threshold).float()
    expected = torch.nn.functional.binary_cross_entropy(model(images).sigmoid(), soft)
    assert trainer._batch_loss(images, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_that_does_not_take_the_sizes_is_refused_before_anything_is_written(
    imagenet, folder, refusal
):
    sizes = "--img-size 64 --first-img-size 32 --grow-epochs 0 1 --eval-resize 64 --workers 0"
    argv = imagenet(folder, "--recipe none --model test_vit", sizes, "--model-kwargs")
    error = refusal([*argv, "dynamic_img_size=false"], train_imagenet.main)
    assert "made for 64 pixels, does not take 32" in error
    assert "dynamic_img_size=true" in error
    assert not folder.exists()
    train_imagenet.main([*argv, "dynamic_img_size=true"])


def test_trivial_augment_is_torchvisions():
    """The step before the last, behind the crop and the flip."""
    *_, policy, _ = train_transform(16, auto_augment="ta_wide").transforms
    assert isinstance(policy, TrivialAugmentWide)
    assert policy.interpolation == InterpolationMode.BILINEAR

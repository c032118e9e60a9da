"""Exported weights and their card: figures of the written file, and images that the run has not seen."""
import re
import shutil

import safetensors.torch
import timm
import torch
from torchvision.transforms.functional import normalize

from ea_vision.base.errors import exit_code
from ea_vision.data.small_images import load_dataset
from ea_vision.engine import run_folder, train_imagenet
from ea_vision.engine.evaluate import logits_by_views
from experiments import weights_card
from tests.data.photos import make_photos
from tests.engine.runner import arguments, make_folder, run


def test_the_card_of_exported_weights_has_the_figures_of_the_file(tmp_path, monkeypatch):
    """Plain and with views, counted here from the written file; the run's one look at the test images chose nothing."""
    folder, log, out = tmp_path / "run", tmp_path / "log", tmp_path / "test_resnet.t.safetensors"
    data = make_folder(tmp_path / "data", train=48)
    assert run(arguments(data, folder, "--epochs", "2", "--eval-epochs", "2", "--tta", "six"), log) == 0
    about = run_folder.read_config(folder)[1]
    test = load_dataset("folder", str(data)).test
    x = normalize(test.images / 255, about["mean"], about["std"])
    for largest_loss, dtype in ((100, "float16"), (-1, "float32")):
        monkeypatch.setattr(weights_card, "LARGEST_LOSS", largest_loss)
        assert weights_card.main([str(folder), "-o", str(out), "--data-dir", str(data)]) == 0
        model = timm.create_model("test_resnet", **about["model_kwargs"], checkpoint_path=str(out)).eval()
        with torch.no_grad():
            plain, six = model(x), logits_by_views(model, x, "six")
        top1, by_six = (100 * (logits.argmax(1) == test.targets).double().mean().item() for logits in (plain, six))
        card = out.with_suffix(".md").read_text()
        assert safetensors.torch.load_file(out)["conv1.0.weight"].dtype == getattr(torch, dtype)
        for said in (f"| stored as | {dtype} |", f"{top1:.2f}% top-1, 100.00% top-5 on the test images. ",
                     f"With several views of an image (`--tta six`): {by_six:.2f}%.",
                     "after epoch 2: nothing was chosen by them",
                     "48 training images, 3 classes: class_0, class_1, class_2;",
                     "--evaluate test_resnet.t --dataset folder --data-dir DIR --tta six"):
            assert said in card


def test_weights_of_photos_are_tested_on_photos_the_run_has_not_seen(tmp_path, capsys):
    root, folder, log = make_photos(tmp_path / "data"), tmp_path / "run", tmp_path / "log"
    argv = ["--recipe", "none", "--model", "test_resnet", "--img-size", "16", "--eval-resize", "20", "--batch-size",
            "8", "--workers", "0", "--epochs", "1", "--device", "cpu", "--data-dir", str(root), "--output", str(folder)]
    assert run(argv, log, main=train_imagenet.main) == 0, log.read_text()
    shutil.copytree(make_photos(tmp_path / "more", val=30) / "val", root / "unseen")
    out = tmp_path / "test_resnet.t.safetensors"
    argv = [str(folder), "-o", str(out), "--data-dir", str(root)]
    for more, message in ((["--split", "val"], "has not seen, got val"), ([], "--split names the test images")):
        assert exit_code(lambda more=more: weights_card.main([*argv, *more])) == 2
        assert message in capsys.readouterr().err
    assert weights_card.main([*argv, "--split", "unseen"]) == 0
    assert re.search(r"on the\s+test images of `unseen`", out.with_suffix(".md").read_text())


def test_cards_say_which_updates_an_earlier_start_made():
    starts = [{"update": update, "by": by} for update, by in ((1, "a"), (11, "a"), (21, "b"), (31, "c"), (41, "b"))]
    assert weights_card.by_update(starts, lambda start: start["by"]) == "b (updates 1 to 20: a; updates 31 to 40: c)"
    assert weights_card.by_update(starts[1:2], lambda start: start["by"]) == "a (updates 1 to 10: not recorded)"
    assert weights_card.by_update(starts[:1], lambda start: start["by"]) == "a"

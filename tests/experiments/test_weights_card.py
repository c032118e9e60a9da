"""Exported weights and their card, with the figures of the written file."""

import safetensors.torch
import timm
import torch
import yaml
from torchvision.transforms.functional import normalize

from ea_vision.data.small_images import load_dataset
from ea_vision.engine import run_folder
from ea_vision.engine.evaluate import logits_by_views
from experiments import weights_card
from tests.data.photos import make_folder
from tests.engine.runner import arguments, train


def top1_of(logits, targets):
    correct = (logits.argmax(1) == targets).double()
    return 100 * correct.mean().item()


def test_the_card_of_exported_weights_has_the_figures_of_the_file(tmp_path, monkeypatch):
    """The test computes them from the written file, plain and with views. The run evaluated on the test images once, at
    its end, so nothing was chosen by them."""
    folder = tmp_path / "run"
    out = tmp_path / "test_resnet.t.safetensors"
    data = make_folder(tmp_path / "data", train=48)
    train(arguments(data, folder, "--epochs 2 --eval-epochs 2 --tta six"))
    about = run_folder.read_config(folder)[1]
    test = load_dataset("folder", str(data)).test
    x = normalize(test.images / 255, about["mean"], about["std"])
    for largest_loss, dtype in ((100, "float16"), (-1, "float32")):
        monkeypatch.setattr(weights_card, "LARGEST_LOSS", largest_loss)
        assert weights_card.main([str(folder), "-o", str(out), "--data-dir", str(data)]) == 0
        keywords = about["model_kwargs"]
        model = timm.create_model("test_resnet", **keywords, checkpoint_path=str(out)).eval()
        with torch.no_grad():
            top1 = top1_of(model(x), test.targets)
            six_views = top1_of(logits_by_views(model, x, "six"), test.targets)
        text = out.with_suffix(".md").read_text()
        front = yaml.safe_load(text.split("---\n")[1])
        metric = front["model-index"][0]["results"][0]["metrics"][0]
        assert front["library_name"] == "timm"
        assert metric["value"] == round(top1, 2)
        assert safetensors.torch.load_file(out)["conv1.0.weight"].dtype == getattr(torch, dtype)
        for said in (
            f"| stored as | {dtype} |",
            f"{top1:.2f}% top-1 on the test images. ",
            f"With several views of an image (`--tta six`): {six_views:.2f}%.",
            "after epoch 2: nothing was chosen by them",
            "48 training images, 3 classes: class_0, class_1, class_2;",
            "--evaluate test_resnet.t --dataset folder --data-dir DIR --tta six",
        ):
            assert said in text

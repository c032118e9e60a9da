"""--teacher: the loss by hand, a teacher that is the student, and what is refused.

`_batch_loss` is what each trainer defines for its task; a run shows its mean over an epoch alone."""

import json

import timm
import torch
import torch.nn.functional as F

from ea_vision.base.files import atomic_write
from ea_vision.engine import run_folder
from ea_vision.engine.config import resolve
from ea_vision.engine.run import put_together
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.train_cifar import CifarConfig, SmallImages
from ea_vision.models.note import NOTE
from ea_vision.zoo.weights_file import encode_weights
from tests.engine.runner import CPU, same_result, stopped, train

MODEL = "test_vit"  # without batch statistics and dropout: it computes the same in training
STATISTICS = {"mean": [0.2, 0.3, 0.4], "std": [0.5, 0.6, 0.7]}


def write_weights(path, classes=3):
    """Write random weights of a network, with their note."""
    kwargs = {"num_classes": classes, "img_size": 32}
    model = timm.create_model(MODEL, **kwargs)
    about = {"model": MODEL, "model_kwargs": kwargs, **STATISTICS}
    atomic_write(path, encode_weights(model.state_dict(), {NOTE: json.dumps(about)}))
    return model.eval()


def test_half_of_the_loss_is_the_divergence_from_the_teacher(data, folder, tmp_path):
    """The teacher sees the student's images, normalised by its own mean and std."""
    path = tmp_path / "teacher.safetensors"
    teacher = write_weights(path)
    options = {"recipe": "none", "model": MODEL, "img_size": 32, "batch_size": 8, "device": "cpu"}
    options |= {"data_dir": str(data), "smoothing": 0.1, "teacher": str(path)}
    config = resolve(CifarConfig, options)
    trainer, _ = put_together(SmallImages(config, CPU, training=True), folder, StopRequest())
    images, targets, _ = next(trainer.train_loader.batches(0))
    loss = trainer._batch_loss(images, targets)
    loss.backward()
    student = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    logits = trainer.model(images)
    loader = trainer.train_loader
    mean, std = (torch.tensor(STATISTICS[name]).view(3, 1, 1) for name in ("mean", "std"))
    shown = images * loader.std.view(3, 1, 1) + loader.mean.view(3, 1, 1)
    with torch.no_grad():
        likely = teacher((shown - mean) / std).softmax(1)
    surprise = likely.log() - logits.log_softmax(1)
    divergence = (likely * surprise).sum(1).mean()
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1) / 2 + divergence / 2
    torch.testing.assert_close(loss, expected)
    expected.backward()
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(student[name], weight.grad, atol=1e-6, rtol=1e-4)
    for weight in trainer.teacher.parameters():
        assert not weight.requires_grad


def test_a_stopped_run_goes_on_with_its_teacher(arguments, folder, tmp_path):
    path = tmp_path / "teacher.safetensors"
    write_weights(path)
    more = f"--teacher {path} --model {MODEL} --img-size 32"
    train(arguments(tmp_path / "whole", more))
    argv = arguments(folder, more)
    stopped(argv, 7)
    train(argv)
    same_result(tmp_path / "whole", folder)
    assert run_folder.read_config(folder)[0]["teacher"] == str(path)
    card = (folder / run_folder.CARD).read_text(encoding="utf-8")
    assert f"| teacher | {path.name} |" in card
    assert str(tmp_path) not in card, "paths of a machine are private"


def test_other_teachers_are_one_line(arguments, folder, tmp_path, refusal):
    other = tmp_path / "other.safetensors"
    write_weights(other, classes=4)
    for teacher, message in (
        (other, "has 4 classes, the data 3"),
        (tmp_path / "nowhere", "nowhere"),
        ("aa_resnet50", "must have trained weights"),
    ):
        assert message in refusal(arguments(folder, f"--img-size 32 --teacher {teacher}"))

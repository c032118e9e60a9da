"""What classifiers learn from besides labels: a teacher; and when mixing ends."""
from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from ea_vision.base.errors import exit_code
from ea_vision.data.imagenet import train_transform
from ea_vision.engine import run_folder, train_cifar
from ea_vision.engine.classification import Teacher, distillation_loss
from tests.engine.runner import arguments, make_folder, make_trainer, run

CPU = torch.device("cpu")


def tiny(folder, **given):
    return make_trainer(folder, timm.create_model("test_resnet", num_classes=3).eval(), batch_size=4, **given)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_loss_is_shared_between_targets_and_teacher(tmp_path, kind):
    trainer = tiny(tmp_path, teacher="a teacher", distillation_type=kind, distillation_alpha=0.3, distillation_tau=2.0,
                           smoothing=0.0)
    teacher = timm.create_model("test_vit", num_classes=3, img_size=32)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    trainer.teacher = Teacher(teacher, mean, std, CPU)
    images, targets = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    pixels = images * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)  # in 0..1
    own = timm.data.resolve_model_data_config(teacher)
    with torch.no_grad():
        taught = teacher((pixels - torch.tensor(own["mean"]).view(-1, 1, 1)) / torch.tensor(own["std"]).view(-1, 1, 1))
        logits = trainer.model(images)
        second = (F.cross_entropy(logits, taught.argmax(1)) if kind == "hard" else
                  4 * F.kl_div((logits / 2).log_softmax(1), (taught / 2).softmax(1), reduction="batchmean"))
        wanted = 0.7 * F.cross_entropy(logits, targets) + 0.3 * second
    loss = trainer._batch_loss(images, targets)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters()) and not teacher.training


def test_a_run_learns_from_another_run(data, tmp_path, capsys):
    """With the teacher alone (alpha 1) the student ends nearer to it than with labels alone."""
    log, first = tmp_path / "log", tmp_path / "first"
    short = ["--epochs", "3", "--model-kwargs", "drop_rate=0"]
    assert run([*arguments(data, first), *short], log) == 0, log.read_text()
    teacher = run_folder.load_run(first)[0]
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    distances = []
    for alpha in ("0", "1"):
        argv = [*arguments(data, tmp_path / alpha), *short, "--seed", "3", "--teacher", str(first),
                "--distillation-alpha", alpha]
        assert run(argv, log) == 0, log.read_text()
        with torch.no_grad():
            student = run_folder.load_run(tmp_path / alpha)[0]
            distances.append(distillation_loss(student(images), teacher(images), 1.0).item())
    assert distances[1] < distances[0]
    other = make_folder(tmp_path / "four", classes=4)
    for images, named, message in ((other, str(first), "has 3 classes, the data 4"),
                                   (data, "resnet1", "unknown model or run folder 'resnet1'")):
        argv = arguments(images, tmp_path / "x", "--teacher", named)
        assert exit_code(lambda argv=argv: train_cifar.main(argv)) == 2 and message in capsys.readouterr().err


def test_mixing_ends_at_its_epoch(tmp_path):
    trainer = tiny(tmp_path, mixup=8.0, mixup_off_epoch=2, smoothing=0.0)  # halves, nearly
    images, targets = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        plain = F.cross_entropy(trainer.model(images), targets).item()
        losses = []
        for epoch in (1, 2):
            trainer.progress.epoch = epoch
            losses.append(trainer._batch_loss(images.clone(), targets).item())
    assert losses[0] != pytest.approx(plain, rel=1e-4) and losses[1] == pytest.approx(plain, rel=1e-5)


def test_trivial_augment_is_torchvisions():
    from torchvision.transforms import InterpolationMode, TrivialAugmentWide

    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    for seed in range(10):
        torch.manual_seed(seed)
        __import__("random").seed(seed)
        plain = Image.fromarray(train_transform(16)(image).numpy())
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        __import__("random").seed(seed)
        ours = train_transform(16, auto_augment="ta_wide")(image)
        torch.set_rng_state(state)
        theirs = TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)(plain)
        assert torch.equal(ours, torch.from_numpy(np.array(theirs)))

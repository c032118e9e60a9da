"""`ea-vision timm` runs scripts with our models; the scripts here work like timm's train.py and validate.py."""

import re
import sys

import pytest

from ea_vision.timm import main
from tests.data.photos import make_photos
from tests.engine.runner import error_of

SCRIPT = """
import sys, helper, timm
print(timm.is_model("ea_aa_resnet50"), __name__, sys.argv[1:], helper.VALUE)
"""

COMMON = """
import argparse
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import create_model, load_checkpoint
from timm.utils import ParseKwargs

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--model")
parser.add_argument("--num-classes", type=int)
parser.add_argument("--img-size", type=int)
parser.add_argument("--checkpoint")
parser.add_argument("--output")
parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
args = parser.parse_args()
model = create_model(args.model, num_classes=args.num_classes, **args.model_kwargs)
config = resolve_data_config(vars(args), model=model)

def loader(split, training):
    return create_loader(
        create_dataset("", root=args.data, split=split, is_training=training), input_size=config["input_size"],
        batch_size=13, is_training=training, no_aug=True, use_prefetcher=False, num_workers=0, mean=config["mean"],
        std=config["std"], interpolation=config["interpolation"], crop_pct=config["crop_pct"],
        persistent_workers=False, device=torch.device("cpu"))
"""

TRAIN = """
from common import args, loader, model
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3

model.set_grad_checkpointing(True)
optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.9)
ema = ModelEmaV3(model, decay=0.5)
scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, warmup_epochs=0)
saver = CheckpointSaver(model, optimizer, args=args, model_ema=ema, checkpoint_dir=args.output)
for epoch in range(epochs):
    model.train()
    for images, targets in loader("train", True):
        loss = torch.nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    scheduler.step(epoch + 1)
    saver.save_checkpoint(epoch, metric=-loss.item())
    print(f"loss {loss.item():.4f}")
"""

VALIDATE = """
from common import args, load_checkpoint, loader, model
import torch
from timm.utils import accuracy

load_checkpoint(model, args.checkpoint, use_ema=True)
model = model.eval()
with torch.no_grad():
    images, targets = next(iter(loader("val", False)))
    (top1,) = accuracy(model(images), targets)
print(f"top1 {top1.item():.2f}")
"""

OPTIONS = (
    "--model ea_conv_transformer_cifar --num-classes 3 --img-size 24 "
    "--model-kwargs widths=[16,32,32,64] alpha=0.25 img_size=24"
)


@pytest.fixture(autouse=True)
def _own_interpreter(monkeypatch):
    """Undo a script's changes of sys.path and sys.argv."""
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])


def test_a_script_sees_our_models_its_arguments_and_its_neighbours(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "helper.py").write_text("VALUE = 7", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["train.py", "DATA", "--model", "ea_aa_resnet50"]) == 0
    assert capsys.readouterr().out == "True __main__ ['DATA', '--model', 'ea_aa_resnet50'] 7\n"


def test_a_missing_script_is_one_line(capsys):
    assert error_of(main, ["validate.py", "DATA"], capsys) == (
        "there is no script validate.py; timm's are in the repository pytorch-image-models"
    )


def test_train_and_validate_as_timms_scripts_do(tmp_path, monkeypatch, capsys):
    data = make_photos(tmp_path / "data", side=24)
    for name, text in (("common", COMMON), ("train", TRAIN), ("validate", VALIDATE)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    def run(script, more):
        monkeypatch.delitem(sys.modules, "common", raising=False)
        assert main(f"{tmp_path}/{script} {data} {OPTIONS} {more}".split()) == 0
        return capsys.readouterr().out

    printed = run("train.py", f"--output {tmp_path}")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 3, printed
    assert losses[-1] < losses[0]
    printed = run("validate.py", f"--checkpoint {tmp_path}/model_best.pth.tar")
    top1 = re.search(r"top1 (\d+\.\d+)", printed)[1]
    assert float(top1) > 40  # a third by chance

"""Every command and snippet of README and docs runs, shortened: small data, small networks, an epoch, one process.

A command that takes too long or needs missing data is in ELSEWHERE, beside the test that runs it; SHORTER has the
options that shorten the others. Multi-GPU commands run as one process.
"""

import re
import shlex
import shutil
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch
import transformers
from PIL import Image

from ea_vision.__main__ import main
from tests.data.photos import make_folder
from tests.models import test_huggingface as huggingface
from tests.process import ROOT
from tests.slow import FFCV, slow_but
from tests.test_docs import BLOCK, PAGES, blocks, commands

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NARROW = {
    "ea_conv_transformer_cifar": "widths=[8,8,16,16]",
    "aa_wrn28_10_cifar": "depth=10 width=1",
    "ea_aa_resnet50": "layers=[1,1,1,1]",
    "ea_aa_resnet34_050": "layers=[1,1,1,1]",
    "ea_vit_small_patch16_224": "depth=2 embed_dim=24 num_heads=2",
    "vit_small_patch16_224": "depth=2 embed_dim=24 num_heads=2",
}
PLACES = {
    "cifar10": "folder",
    "DIR": "data",
    "CIFAR10": "data",
    "/data/imagenet": "photos",
    "OWN_PHOTOS": "photos",
    "PHOTOS": "photos",
    "RUN_OR_MODEL": "runs/demo",
    "runs/imagenet-ea_aa_resnet50": "runs/imagenet",
    "/shared/runs/ea50": "runs/ea50",
    "docs/cat.jpg": "photo.jpg",
    "*.jpg": "photo.jpg",
    "docs/attention.html": "page.html",
    "photos/val/bird": "photos/val/class_0",
    "vit_small_patch16_224.dino": "runs/vit",
    "deit_small_patch16_224,vit_small_patch16_224": "runs/vit",
}
SHORTER = {  # options that end a command, over those that it has
    "train-cifar": "--epochs 1 --batch-size 8 --img-size 8 --device cpu --workers 0",
    "train-imagenet": "--epochs 1 --warmup-epochs 0 --batch-size 8 --img-size 32 --eval-img-size 0 --eval-resize 36 "
    "--device cpu --workers 0 --no-pretrained",
    "heatmap": "--dpi 30",
    "strip": "--dpi 30",
    "matrix": "--dpi 30",
    "rollout": "--dpi 30",
    "probe": "--limit 12 --epochs 1 --width 8 --controls none --layers 1",
    "predict": "",
    "explore": "",
    "write-ffcv": "--workers 1",
}
ELSEWHERE = (  # command lines that other tests run
    "export |predict net.onnx "  # deployment/test_files.py
    "|predict runs/mine |train-detection "  # detection/test_predict.py, test_train.py
    "|models --sizes ea_aa_tiny"  # outside/test_outside.py
    "|timm "  # test_timm_scripts.py
    "|train-cifar$"
)  # all digits: slow, test_wheel.py
SNIPPETS_ELSEWHERE = {  # first line of a Python block, and the test that runs it or what it is an excerpt of
    "register_networks(__name__, TinyAttn, {": "outside/tiny_attn.py",
    '@register_evolution("shared")': "outside/residual_maps.py",
    "detector = create_detector(": "detection/test_model.py",
    "half = convert_float_to_float16(": "deployment/test_files.py",
    'detector = ea_vision.load("runs/mine")': "detection/test_predict.py",
}


def lines_of(pages):
    """Return the command lines that are run here, without repetitions."""
    lines = {}
    for page in pages:
        if page.name != "published.md":  # experiments/test_published.py
            lines |= dict.fromkeys(shlex.join(words) for words in commands(page))
    return [line for line in lines if not re.match(ELSEWHERE, line)]


LINES = lines_of(PAGES)
README_LINES = lines_of([ROOT / "README.md"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the commands name: photos, data, runs; the working directory of the tests."""
    folder = tmp_path_factory.mktemp("docs")
    small = f"train-cifar --dataset folder --data-dir data {SHORTER['train-cifar']} --img-size 32"
    large = f"train-imagenet --data-dir photos {SHORTER['train-imagenet']}"
    vit = "--model test_vit --model-kwargs patch_size=8"
    cat = Image.open(ROOT / "docs" / "cat.jpg")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cat.resize((80, 60)).save("photo.jpg")
        make_folder(Path("data"), train=30, test=6, side=16)
        make_folder(Path("photos"), train=12, test=3, side=64)
        Path("photos/val").symlink_to("test")
        for line in (
            f"{small} --output runs/aa --model-kwargs widths=[8,8,16,16]",
            f"{small} --output runs/vit {vit}",
            f"{large} --output runs/photos {vit}",
            f"{large} --output runs/imagenet --model test_resnet",
        ):
            assert main(line.split()) == 0
        for copy in ("a", "b", "ea", "demo"):
            shutil.copytree("runs/aa", f"runs/{copy}")
        yield folder


def shorten(line):
    """Return a command line's words and options that shorten it; if an option occurs twice, the last one counts."""
    command, *words = shlex.split(line)
    here = [PLACES.get(word, word) for word in words]
    if command == "heatmap" and {"runs/vit", "runs/photos"} & {*here}:
        here += ["--layers", "2"]
    output = f"out/{LINES.index(line)}"
    if "--evaluate" in words:
        more = "--img-size 32" if "folder" in here else ""
    elif not command.startswith("train-"):
        more = SHORTER[command]
        if command == "probe":
            more += f" -o {output}"
    else:
        more = f"{SHORTER[command]} --output {output}"
        if "folder" in here:
            more += " --no-download"
            if "--data-dir" not in words:
                more += " --data-dir data"
        if command == "train-cifar" and "--pretrained" in line:  # the weights in the package
            more += " --img-size 32"
        else:
            default_model = (
                "ea_conv_transformer_cifar" if command == "train-cifar" else "ea_aa_resnet50"
            )
            name = here[here.index("--model") + 1] if "--model" in here else default_model
            narrow = NARROW.get(name, NARROW["ea_conv_transformer_cifar"])
            more += f" --model-kwargs {narrow}"
        if "scenes" in here:  # a recipe whose images grow
            more += " --first-img-size 16"
        if "--holdout" in words:
            more += " --holdout 6"
    return [command, *here, *more.split()]


@pytest.mark.parametrize("line", slow_but(README_LINES, LINES))
def test_commands_run(line, place, capsys):
    if ("beton" in line or line.startswith("write-ffcv")) and not FFCV:
        pytest.skip("needs FFCV (the extra ffcv)")
    if "--train-beton" in line:
        for split in ("train", "validation"):
            out = f"{split.removesuffix('idation')}.beton"
            options = "--data-dir photos --eval-img-size 32 --eval-resize 36"
            assert main(f"write-ffcv {options} --split {split} --out {out}".split()) == 0
    if line.endswith("--help"):
        with pytest.raises(SystemExit) as left:
            main(shlex.split(line))
        assert left.value.code == 0
        return
    assert main(shorten(line)) == 0, capsys.readouterr().err


SNIPPETS = []
for page in PAGES:
    for index, block in enumerate(blocks(page, "python")):
        SNIPPETS.append(pytest.param(page, block, id=f"{page.name}-{index}"))
SMALLER = {
    '"vit_small_patch16_224", num_classes=3,': '"test_vit", num_classes=3, patch_size=8, img_size=32,',
    "pretrained=True": "pretrained=False",
    'weights="DEFAULT"': "weights=None",
    "vit_small_patch16_224": "vit_tiny_patch16_224",
    "vit_base_patch16_224.dino": "vit_tiny_patch16_224",
}


@pytest.fixture
def offline(monkeypatch):
    """Small networks with random weights, and what prepares their inputs, in place of transformers' downloads."""

    def tokenizer(sentences, **_):
        ids = [torch.arange(3, 3 + len(sentence.split())) for sentence in sentences]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return {"input_ids": padded, "attention_mask": (padded > 0).long()}

    sizes = dict(hidden_size=24, num_attention_heads=6, intermediate_size=32)
    for name, loaded in {
        "ViTModel": transformers.ViTModel(transformers.ViTConfig(**sizes)),
        "AutoImageProcessor": transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
        "AutoModel": huggingface.create("DINOv3ViT"),
        "AutoTokenizer": tokenizer,
        "AutoModelForSequenceClassification": huggingface.create(
            "Bert", "ForSequenceClassification", num_labels=3
        ),
    }.items():
        load = mock.Mock(return_value=loaded)
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", load)


@pytest.mark.parametrize("page, block", SNIPPETS)
def test_snippets_run(page, block, place, tmp_path, monkeypatch, offline):
    """The quick start's run in test_quickstart.py."""
    for start, test in SNIPPETS_ELSEWHERE.items():
        if start in block:
            if test.startswith("outside/"):  # an excerpt: its statements stand there
                kept = (ROOT / "tests" / test).read_text(encoding="utf-8")
                for name in re.findall(r"(?:class|def) \w+", block):
                    assert name in kept
            return
    if "photo.rename" in block:
        monkeypatch.chdir(tmp_path)
        make_folder(Path("photos"), train=24, test=0)
    for word, other in SMALLER.items():
        block = block.replace(word, other)
    space = {}
    if page.name == "record.md" and "model = " not in block:  # that of the page's first block
        space["model"] = timm.create_model("deit_tiny_distilled_patch16_224").eval()
    exec(compile(block, page.name, "exec"), space)
    if "photo.rename" in block:
        assert len(list(Path("photos/train").rglob("*.png"))) == 18
        assert len(list(Path("photos/val").rglob("*.png"))) == 6
    if "AutoModel" in block:
        assert any(".maps." in key for key in space["model"].state_dict())
    if "maps.pdf" in block:
        assert space["maps"][12].attn.shape == (2, 6, 197, 197)
        assert Path("maps.pdf").read_bytes().startswith(b"%PDF")
    if "features_only" in block:
        assert len(space["backbone"](torch.randn(1, 3, 64, 64))) == 5
    if "def attend" in block:
        q, k, v = torch.randn(3, 2, 8, 6, 4).unbind()
        out, logits = space["attend"](q, k, v, space["decoder"])
        out, _ = space["attend"](q, k, v, space["decoder"], logits)
        assert out.shape == v.shape
        assert out.isfinite().all()


def test_make_s_targets_exist():
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)
    named = set()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for _, _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            named.update(re.findall(r"^make ([\w-]+)", block, re.MULTILINE))
    assert {"demo", "test"} <= named <= set(targets)


def test_the_demo_s_next_commands_run(place, monkeypatch):
    next_ones = re.findall(r'@echo "  \$\(VENV\)/bin/ea-vision (.*)"', MAKEFILE)
    assert len(next_ones) == 3
    for line in next_ones:
        words = shlex.split(line.replace("$(DEMO)", "runs/demo"))
        assert main([PLACES.get(word, word) for word in words]) == 0

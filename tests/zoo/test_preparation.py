"""A network sees an image as it was evaluated: in predict, figures, the probe and exported files, to the bit."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from timm.models import save_for_hf
from torch import nn

import ea_vision
from ea_vision import export, predict
from ea_vision.base.errors import UsageError
from ea_vision.data.small_images import load_dataset
from ea_vision.engine import train_cifar, train_imagenet
from ea_vision.engine.config import resolve
from ea_vision.visualize.figure_request import record
from ea_vision.zoo.loaded import as_model
from tests.recorder.networks import gap, lively
from tests.run_folders import write_run

TRAINERS = {
    "train-cifar": (train_cifar, train_cifar.CifarConfig),
    "train-imagenet": (train_imagenet, train_imagenet.ImageNetConfig),
}
NETWORKS = ["test_resnet", "test_vit"]  # without and with a keyword img_size
CLASSES = ["ant", "bee", "cow"]
SHAPES = [(97, 131), (131, 97), (40, 40), (32, 32), (20, 15), (300, 60)]


def colours(size, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def in_mode(image, mode):
    """Return an image in a mode of Pillow; where the mode has an alpha, it is the image's grey."""
    if mode == "P":
        return image.quantize(16)
    if mode in ("RGBA", "LA"):
        grey = image.convert("L")
        image = image.convert("RGBA")
        image.putalpha(grey)
    return image.convert(mode)


MODES = {
    "alpha.png": "RGBA",
    "alpha.webp": "RGBA",
    "grey with alpha.png": "LA",
    "palette.png": "P",
    "palette.gif": "P",
    "grey.png": "L",
    "cmyk.jpg": "CMYK",
    "one bit.png": "1",
    "turned.jpg": "RGB",
    "colours.bmp": "RGB",
    "colours.tiff": "RGB",
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of three classes with every kind of file that people have."""
    root = tmp_path_factory.mktemp("photos")
    turned = Image.Exif()
    turned[274] = 6  # on its side
    options = {"palette.png": {"transparency": 3}, "turned.jpg": {"exif": turned}}
    grey16 = np.random.default_rng(0).integers(0, 65536, (50, 70), dtype=np.uint16)
    images = {f"{width}x{height}.png": colours((width, height), 1) for width, height in SHAPES}
    images["16 bits.png"] = Image.fromarray(grey16)
    for seed, (name, mode) in enumerate(MODES.items(), start=3):
        images[name] = in_mode(colours((60, 50), seed), mode)
    for number, (name, image) in enumerate(images.items()):
        folder = root / "val" / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / name, **options.get(name, {}))
    shutil.copytree(root / "val", root / "train")
    return root


def sorted_files(photos):
    return sorted(path for path in (photos / "val").rglob("*") if path.is_file())


def network(name, size):
    kwargs = {"num_classes": 3} | ({"img_size": size} if name == "test_vit" else {})
    torch.manual_seed(0)
    return lively(timm.create_model(name, **kwargs)), kwargs


def random_run(folder, trainer, name, size, **options):
    """Write the run folder of a network with random weights, as a trainer leaves it."""
    model, kwargs = network(name, options.get("eval_img_size", size))
    options = {"recipe": "none", "model": name, "img_size": size, **options}
    config = asdict(resolve(TRAINERS[trainer][1], options))
    about = {"classes": CLASSES, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.25]}
    return write_run(folder, name, model, kwargs, config, **about)


class Inputs:
    """The images (N, 3, H, W) that a classifier gets while this is open."""

    def __enter__(self):
        self.batches = []
        self.hook = nn.modules.module.register_module_forward_pre_hook(self.keep)
        return self

    def keep(self, module, args):
        if type(module).__name__ in ("ResNet", "VisionTransformer", "ExportedNetwork"):
            self.batches.append(args[0].clone())

    def __exit__(self, *_):
        self.hook.remove()
        self.images = torch.cat(self.batches)


def evaluated(trainer, target, photos, output, *options):
    """Return the inputs and the top-1 of --evaluate."""
    main = TRAINERS[trainer][0].main
    data = ["--data-dir", str(photos), "--workers", "0", "--device", "cpu"]
    if trainer == "train-cifar":
        data += ["--dataset", "folder"]
    with Inputs() as seen:
        assert main(["--evaluate", str(target), "--output", str(output), *data, *options]) == 0
    return seen.images, json.loads((output / "evaluation.json").read_text())["top1"]


def predicted(target, photos, output):
    """Return the inputs of predict, and the share of images that it classifies as their folder says."""
    listed = output / "predictions.json"
    with Inputs() as seen:
        files = [str(path) for path in sorted_files(photos)]
        assert predict.main([str(target), *files, "--json", str(listed), "--device", "cpu"]) == 0
    right = 0
    rows = json.loads(listed.read_text())
    for row in rows:
        index = row["classes"][0]["index"]
        right += CLASSES[index] == Path(row["image"]).parent.name
    return seen.images, 100 * right / len(rows)


def check_alike(trainer, target, photos, output, *options):
    """Check that predict and preprocess give the network what --evaluate gives it; return the inputs."""
    output.mkdir(exist_ok=True)
    expected, top1 = evaluated(trainer, target, photos, output, *options)
    inputs, share = predicted(target, photos, output)
    assert share == pytest.approx(top1, abs=0.01)
    model = ea_vision.load(str(target))
    expected = expected[-len(inputs) :]  # after zeros, on which the trainer tries a size
    for row, file in enumerate(sorted_files(photos)):
        same = (expected == inputs[row]).flatten(1).all(1)
        assert same.any(), file
        assert torch.equal(ea_vision.preprocess(str(target), file)[0], inputs[row]), file
    assert inputs.shape == expected.shape
    assert model(inputs[:2]).shape == (2, 3)
    return inputs


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "trainer, options",
    [
        ("train-cifar", {}),
        ("train-imagenet", {"eval_resize": 32}),
        ("train-imagenet", {"eval_resize": 34, "interpolation": "bicubic"}),
        ("train-imagenet", {"eval_resize": 37}),
        ("train-imagenet", {"eval_resize": 56, "eval_img_size": 48}),
    ],
)
def test_predict_sees_what_evaluate_sees(tmp_path, photos, trainer, options, name):
    """Of a run, of weights in it, of the same weights elsewhere, and of the network as a file."""
    run = random_run(tmp_path / "run", trainer, name, 32, **options)
    weights = run / "model.safetensors"
    moved = shutil.copy(weights, tmp_path / "net.safetensors")
    file = tmp_path / "net.pt2"
    assert export.main([str(run), "-o", str(file)]) == 0
    expected, _ = predicted(file, photos, tmp_path)
    assert len(expected) == len(sorted_files(photos))
    for target in (run, weights, moved):
        assert torch.equal(check_alike(trainer, target, photos, tmp_path / "output"), expected)


@pytest.mark.parametrize("crop_pct", [0.875, 0.95, 1.0])
@pytest.mark.parametrize(
    "crop_mode, interpolation", [("center", "bicubic"), ("squash", "bilinear")]
)
def test_a_network_by_its_name_is_evaluated_as_it_says(
    tmp_path, photos, crop_pct, crop_mode, interpolation
):
    """Its own size, crop and interpolation, as timm evaluates it; the trainer's options where one is given."""
    model, _ = network("test_resnet", 40)
    model.pretrained_cfg |= {"input_size": (3, 40, 40), "crop_pct": crop_pct}
    model.pretrained_cfg |= {"crop_mode": crop_mode, "interpolation": interpolation}
    model.pretrained_cfg["label_names"] = CLASSES
    save_for_hf(model, tmp_path / "saved")
    target = f"local-dir:{tmp_path / 'saved'}"
    inputs = check_alike("train-imagenet", target, photos, tmp_path / "a")
    transform = timm.data.create_transform(
        (3, 40, 40),
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        interpolation=interpolation,
        mean=model.pretrained_cfg["mean"],
        std=model.pretrained_cfg["std"],
    )
    file = photos / "val" / "ant" / "97x131.png"
    row = sorted_files(photos).index(file)
    torch.testing.assert_close(inputs[row], transform(Image.open(file)))
    others, _ = evaluated(
        "train-imagenet", target, photos, tmp_path / "b", "--img-size", "24", "--eval-resize", "28"
    )
    assert others.shape[-2:] == (24, 24)


def test_shipped_networks_for_small_images_see_what_train_cifar_evaluates(photos):
    data = train_cifar.SmallImages(
        resolve(train_cifar.CifarConfig, {"dataset": "folder", "data_dir": str(photos)}),
        train_cifar.World(0, 1, torch.device("cpu")),
        training=False,
    )
    model = timm.create_model("conv_transformer_cifar")
    [batch] = data.eval_loader(**data.loader_keywords(model)).batches()
    for image, index in zip(batch.images, batch.ids.tolist(), strict=True):
        assert torch.equal(ea_vision.preprocess(model, data.test.names[index])[0], image)


# ---- image processors ------------------------------------------------------------------------------------------------


def processors():
    """Return the names of all image processors of the installed transformers."""
    names = [name for name in dir(transformers) if name.endswith("ImageProcessor")]
    return [name for name in names if name not in ("AutoImageProcessor", "BaseImageProcessor")]


@pytest.mark.slow
@pytest.mark.parametrize("name", processors())
@pytest.mark.filterwarnings("ignore")
def test_inputs_are_those_of_every_image_processor(name):
    """They make one image of three channels, or are refused by name."""
    check_processor(name)


@pytest.mark.parametrize(
    "name, options",
    [
        ("LevitImageProcessor", {}),
        ("ConvNextImageProcessor", {}),
        ("Owlv2ImageProcessor", {}),
        ("CLIPImageProcessor", {"crop_size": {"height": 112, "width": 224}}),
        ("ViTImageProcessor", {"do_resize": False}),
        ("ViTImageProcessor", {"do_normalize": False}),
        ("ViTImageProcessor", {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3}),
        ("DeiTImageProcessor", {"size": {"height": 40, "width": 40}}),
        ("GLPNImageProcessor", {}),
        ("MobileViTImageProcessor", {}),  # blue comes first
        ("DetrImageProcessor", {}),  # the input's size is the image's
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_inputs_are_those_of_the_image_processor(name, options):
    assert check_processor(name, **options), "it makes one image of three channels"


def check_processor(name, **options):
    """Check the input of a processor; return whether it makes one image of three channels."""
    try:
        processor = getattr(transformers, name)(**options)
    except Exception as error:  # it needs more than its defaults
        pytest.skip(str(error))
    image = colours((9, 9), 0).resize((300, 200), Image.Resampling.BICUBIC)
    model = nn.Conv2d(3, 4, 3)
    try:
        expected = processor(image, return_tensors="pt")["pixel_values"]
        [expected] = expected.reshape(-1, *expected.shape[-3:]).float()
        makes_image = len(expected) == 3
    except Exception:  # of many kinds
        makes_image = False
    try:
        x = ea_vision.preprocess(model, image, processor=processor)
    except UsageError as error:
        assert name in str(error)
        assert "\n" not in str(error)
        assert not makes_image, error
        return False
    assert torch.equal(x, expected[None])
    return True


@pytest.mark.parametrize("name", ["MobileViTImageProcessor", "Owlv2ImageProcessor"])
@pytest.mark.filterwarnings("ignore")
def test_figures_show_the_pixels_that_the_network_saw(name):
    """Un-normalised, red before blue; and another mean and std are those of the input."""
    processor = getattr(transformers, name)()
    loaded = as_model(nn.Conv2d(3, 4, 3), processor=processor)
    colour = torch.tensor([200.0, 120.0, 40.0]) / 255
    image = Image.new("RGB", (300, 200), (200, 120, 40))
    shown = record(loaded, image, []).image
    H, W = shown.shape[1:]
    middle = shown[:, H // 4, W // 2]
    assert gap(middle, colour) < 0.01
    mean = (0.1, 0.2, 0.3)
    x = ea_vision.preprocess(loaded, image, mean=mean, std=(2.0, 2.0, 2.0))[0, :, H // 4, W // 2]
    channels = colour.flip(0) if name.startswith("MobileViT") else colour
    assert gap(x, (channels - torch.tensor(mean)) / 2) < 0.01


def test_the_probe_sees_what_is_evaluated(tmp_path, photos):
    run = random_run(tmp_path / "run", "train-imagenet", "test_resnet", 32, eval_resize=37)
    preparation = as_model(run).preparation
    images = load_dataset("folder", str(photos), preparation).test
    for image, file in zip(images.images, images.names, strict=True):
        assert torch.equal(preparation.normalize(image), ea_vision.preprocess(run, file)[0])

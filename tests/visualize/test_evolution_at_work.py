"""The first pictures: their commands draw them anew, and what the docs say of them is counted."""

import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ea_vision
from ea_vision.recorder.inputs import find_images, read_image
from ea_vision.recorder.loading import load_model
from ea_vision.recorder.recording import PARTS, recordable_layers
from ea_vision.visualize.heatmap import main as heatmap
from ea_vision.visualize.image_maps import record
from experiments.evolution_at_work import changes, choose, main

ROOT = Path(__file__).resolve().parents[2]
CAT = ROOT / "docs" / "cat.jpg"
CIFAR = ROOT.parent / "shared" / "data" / "cifar10" / "test.tar"


def difference(one: Image.Image, other: Image.Image) -> float:
    """Return the mean difference of two pictures, in steps of 1 of 255."""
    pixels = [np.asarray(picture.convert("RGB"), float) for picture in (one, other)]
    return np.abs(pixels[0] - pixels[1]).mean()


def test_each_claim_of_the_caption_is_a_number_of_the_maps():
    """Recomputed by the paper's equation: alpha 0, the own logits convolved at their scale."""
    model = load_model("ea_conv_transformer_cifar")
    recording = record(model, Image.open(CAT), recordable_layers(model.model)[:3], PARTS)
    changed = changes(recording)
    head, query = choose(changed, recording.img_size)
    caption = the_caption()
    assert f"Head {head}, query y {query[0]}, x {query[1]}, of" in caption
    token = query[0] // 4 * 8 + query[1] // 4
    smallest = []
    for number in (2, 3):
        layer = recording.maps[number]
        conv = model.model.get_submodule(layer.name).evolution.convs[0]
        with torch.inference_mode():
            alone = conv(layer.self_logits).relu().softmax(-1)[0]
        attn = layer.attn[0]
        change = 1 - torch.minimum(attn, alone).sum(-1)
        torch.testing.assert_close(changed[number].flatten(1), change, atol=1e-5, rtol=0)
        smallest.append(change)
        cells = [divmod(int(maps[head, token].argmax()), 8) for maps in (attn, alone)]
        (row, column), (row_alone, column_alone) = cells
        assert (
            f"In layer {number} attention and that of the layer's own logits alone differ by "
            f"{change[head, token]:.2f} of at most 1; their largest cells are row {row}, column {column} and "
            f"row {row_alone}, column {column_alone}."
        ) in caption
    least = torch.stack(smallest).amin(0)
    assert least[head, token] == least.max()


def the_caption() -> str:
    """Return the caption below the picture in the docs, in one line."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    below = page.partition("visualize/evolution.png)")[2].split("\n\n")[1]
    return " ".join(below.split())


def test_the_script_draws_the_picture_and_prints_its_caption(tmp_path, capsys):
    assert main(f"{CAT} --typical {CAT} -o {tmp_path}/evolution.png".split()) == 0
    with (
        Image.open(tmp_path / "evolution.png") as new,
        Image.open(ROOT / "visualize" / "evolution.png") as shown,
    ):
        assert new.size == shown.size and new.width >= 2 * 72 * 6.7
        assert difference(new, shown) < 1
    printed = capsys.readouterr().out.splitlines()[0]
    claims, _, typical = printed.partition(" Mean difference over")
    assert claims in the_caption()
    assert re.fullmatch(
        r" heads and queries of 1 images: \S+ in layer 2 and \S+ in layer 3\.", typical
    )


def test_the_command_draws_the_first_picture(tmp_path, monkeypatch):
    """The command of the Makefile."""
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    options = re.search(r"heatmap\.py (.*--style light.*)", makefile)[1].split()
    photos = find_images(sorted(str(path) for path in (ROOT / "docs" / "photos").glob("*.jpg")))
    options = [option for option in options if option != "docs/photos/*.jpg"]
    options[options.index("-o") + 1] = str(tmp_path / "light.png")
    assert heatmap([*options, *photos]) == 0
    with (
        Image.open(tmp_path / "light.png") as new,
        Image.open(ROOT / "visualize" / "light.png") as shown,
    ):
        assert new.size == shown.size and difference(new, shown) < 1


def light_maps(images: torch.Tensor) -> np.ndarray:
    """Return head 0 of layer 3, mean of all queries, (images, 8, 8)."""
    model = load_model("ea_conv_transformer_cifar")
    with torch.inference_mode(), ea_vision.record_attention(model.model, [3]) as maps:
        model.model(model.normalize(images))
    return maps[3].attn[:, 0].mean(1).unflatten(1, (8, 8)).numpy()


def likeness(maps: np.ndarray, others: np.ndarray) -> float:
    """Return the mean correlation of maps with others."""
    pairs = zip(maps, np.broadcast_to(others, maps.shape), strict=True)
    return np.mean([np.corrcoef(one.ravel(), other.ravel())[0, 1] for one, other in pairs])


def test_a_mirrored_photo_mirrors_its_map():
    model = load_model("ea_conv_transformer_cifar")
    photos = [CAT, *sorted((ROOT / "docs" / "photos").glob("*.jpg"))]
    images = torch.stack([model.prepare(read_image(photo)) for photo in photos])
    mirrored = light_maps(images.flip(-1))[..., ::-1]
    assert likeness(light_maps(images), mirrored) > 0.8


@pytest.mark.skipif(not CIFAR.exists(), reason="needs CIFAR-10 beside the checkout")
def test_how_centred_the_maps_are_as_the_docs_say(tmp_path):
    """Every fiftieth of the 10,000 test images, in the order of their names."""
    with tarfile.open(CIFAR) as tar:
        tar.extractall(tmp_path, filter="data")
    folders = sorted(str(path) for path in tmp_path.iterdir() if path.is_dir())
    images = find_images(folders)[::50]
    model = load_model("ea_conv_transformer_cifar")
    batch = torch.stack([model.prepare(read_image(image)) for image in images])
    maps = light_maps(batch)
    mirror = likeness(maps, light_maps(batch.flip(-1))[..., ::-1])
    mean = likeness(maps, maps.mean(0))
    page = " ".join((ROOT / "docs" / "how-it-works.md").read_text().split())
    assert f"the mirrored map (correlation {mirror:.2f})" in page
    assert f"the mean map of all images is {mean:.2f} correlated" in page

"""Images read as they are needed: order and crops are functions of seed, epoch and index; bad files named."""
from __future__ import annotations

import tarfile

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image

from ea_vision.base.errors import UsageError
from ea_vision.data.bad_images import BadImages
from ea_vision.data.image_files import to_rgb
from ea_vision.data.imagenet import (
    ImageEvalLoader,
    ImageSource,
    ImageTrainLoader,
    eval_transform,
    train_transform,
)
from ea_vision.data.splits import find_split
from tests.data.photos import make_photos

COMMON = {"img_size": 16, "mean": (0.5,) * 3, "std": (0.2,) * 3, "device": torch.device("cpu")}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


def train_loader(source, batch_size, workers=1, **more):
    more.setdefault("bad_images", BadImages(0))
    return ImageTrainLoader(source, transform=train_transform(16, color_jitter=0.4), batch_size=batch_size,
                            workers=workers, **COMMON, **more)


def eval_loader(source, batch_size, **more):
    more.setdefault("bad_images", BadImages(0))
    return ImageEvalLoader(source, transform=eval_transform(16, 20), batch_size=batch_size, workers=1, **COMMON, **more)


def test_images_depend_on_seed_and_epoch_only(photos):
    """Not on the number of workers, on where the epoch is entered, nor on the number of processes."""
    source = ImageSource("", photos / "train", "train")
    whole = list(train_loader(source, 8).batches(3))
    halves = [list(train_loader(source, 4, workers=2, rank=rank, world_size=2).batches(3, first=1)) for rank in (0, 1)]
    assert len(whole) == 5 and len(halves[0]) == 4
    for batch, first, second in zip(whole[1:], *halves, strict=True):
        for part in range(3):
            assert torch.equal(batch[part], torch.cat([first[part], second[part]]))
    other = next(train_loader(source, 8).batches(4))
    assert sorted(torch.cat([b.ids for b in whole]).tolist()) == list(range(40))
    assert not torch.equal(other.ids, whole[0].ids)


@pytest.mark.parametrize("world_size, batch_size", [(1, 5), (3, 2), (4, 4)])
def test_evaluation_shows_every_image_once(photos, world_size, batch_size):
    source = ImageSource("", photos / "val", "validation")
    loaders = [eval_loader(source, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(loader.batches()) for loader in loaders]
    assert {len(b) for b in batches} == {len(loaders[0])}
    ids = torch.cat([b.ids for of_rank in batches for b in of_rank])
    assert sorted(ids.tolist()) == list(range(13))


def test_evaluation_pixels_are_timms(photos):
    source = ImageSource("", photos / "val", "validation")
    batch = next(eval_loader(source, 13).batches())
    transform = timm.data.create_transform(16, crop_pct=0.8, interpolation="bilinear", mean=(0.5,) * 3, std=(0.2,) * 3)
    wanted = torch.stack([transform(source.read(index)[0]) for index in range(13)])
    assert torch.allclose(batch.images, wanted, atol=1e-5)


def test_a_tar_equals_its_folder(photos, tmp_path):
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        tar.add(photos / "val", ".")
    folder = ImageSource("", find_split(photos, "validation"), "validation")
    tar = ImageSource("", find_split(tmp_path, "validation"), "validation")
    assert tar.classes == folder.classes == ["class_0", "class_1", "class_2"]
    a, b = next(eval_loader(folder, 13).batches()), next(eval_loader(tar, 13).batches())
    order = sorted(range(13), key=lambda i: tar.describe(i)[-7:])
    other = sorted(range(13), key=lambda i: folder.describe(i)[-7:])
    assert torch.equal(b.images[order], a.images[other]) and torch.equal(b.targets[order], a.targets[other])


def test_unreadable_images_are_named_and_replaced(photos, tmp_path):
    root = make_photos(tmp_path)
    (root / "train/class_0/000.jpg").write_text("no image")
    (root / "val/class_1/001.jpg").write_bytes((root / "val/class_1/001.jpg").read_bytes()[:300])
    bad = BadImages(5)
    source = ImageSource("", root / "train", "train")
    ids = torch.cat([b.ids for b in train_loader(source, 8, bad_images=bad).batches(0)])
    broken = next(i for i in range(40) if source.describe(i).endswith("000.jpg"))
    assert len(ids) == 40 and broken not in ids
    assert list(bad.new) == [str(root / "train/class_0/000.jpg")] and "UnidentifiedImageError" in str(bad.new)
    evaluated = ImageSource("", root / "val", "validation")
    assert sum(len(b.ids) for b in eval_loader(evaluated, 5, bad_images=bad).batches()) == 12
    assert str(root / "val/class_1/001.jpg") in bad.new


def test_cmyk_grey_palette_and_16_bit_images(tmp_path):
    pixels = np.tile(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], (20, 1, 3))  # (20, 60, 3)
    image = Image.fromarray(pixels)
    (tmp_path / "a").mkdir()
    image.convert("CMYK").save(tmp_path / "a/cmyk.jpg", quality=95)
    image.convert("L").save(tmp_path / "a/grey.png")
    image.convert("RGBA").save(tmp_path / "a/rgba.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 256).save(tmp_path / "a/sixteen.png")
    source = ImageSource("", tmp_path, "train")
    for index in range(4):
        read, _ = source.read(index)
        assert read.mode == "RGB"
        assert np.abs(np.asarray(read).astype(int) - pixels).max() <= 3, source.describe(index)
    white = to_rgb(Image.fromarray(np.full((2, 2), 65535, np.uint16)))
    assert np.array_equal(np.asarray(white), np.full((2, 2, 3), 255))


def test_bad_data_is_named(photos, tmp_path):
    with pytest.raises(UsageError, match="must have 4 classes .* got 3"):
        ImageSource("", photos / "train", "train", num_classes=4)
    root = make_photos(tmp_path / "empty_class")
    (root / "train/class_9").mkdir()
    with pytest.raises(UsageError, match="1 class folder.* have no images: class_9"):
        ImageSource("", root / "train", "train")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="nothing has no images: class/name .*; it has no files"):
        ImageSource("", tmp_path / "nothing", "train")
    with pytest.raises(UsageError, match="does not exist"):
        find_split(tmp_path / "nowhere", "train")
    with pytest.raises(UsageError, match="must have val/ or val.tar"):
        (tmp_path / "half/train").mkdir(parents=True)
        find_split(tmp_path / "half", "validation")


def test_tiny_imagenets_layout_works_as_it_is(tmp_path):
    """train/CLASS/images/x.JPEG beside boxes; val/images/x.JPEG, whose classes are in a file."""
    plain = make_photos(tmp_path / "plain")
    root, lines = tmp_path / "tiny", []
    for path in sorted((plain / "train").rglob("*.jpg")):
        to = root / "train" / path.parent.name / "images" / f"{path.parent.name}_{path.stem}.JPEG"
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())
        (to.parent.parent / f"{path.parent.name}_boxes.txt").write_text(f"{to.name}\t0\t0\t9\t9\n")
    (root / "val/images").mkdir(parents=True)
    for path in sorted((plain / "val").rglob("*.jpg")):
        (root / "val/images" / f"val_{path.stem}.JPEG").write_bytes(path.read_bytes())
        lines.append(f"val_{path.stem}.JPEG\t{path.parent.name}\t0\t0\t9\t9\n")
    (root / "val/val_annotations.txt").write_text("".join(lines))
    for split in ("train", "validation"):
        tiny, wanted = (ImageSource("", find_split(place, split), split) for place in (root, plain))
        assert tiny.classes == wanted.classes and len(tiny) == len(wanted)
        for index in range(len(tiny)):
            image, target = tiny.read(index)
            number = tiny.describe(index).rsplit("_")[-1].removesuffix(".JPEG")
            other = next(i for i in range(len(wanted)) if wanted.describe(i).endswith(f"/{number}.jpg"))
            assert np.array_equal(image, wanted.read(other)[0]) and target == wanted.read(other)[1]
    before = ImageSource("", root / "val", "validation").fingerprint()
    lines[0], lines[1] = (lines[0].replace("class_0", "class_1"), lines[1].replace("class_1", "class_0"))
    (root / "val/val_annotations.txt").write_text("".join(lines))
    assert ImageSource("", root / "val", "validation").fingerprint() != before
    (root / "val/val_annotations.txt").write_text("".join(lines[1:]))
    with pytest.raises(UsageError, match="must name the class of every image .*, got none for 1 of 13, such as val_"):
        ImageSource("", root / "val", "validation")

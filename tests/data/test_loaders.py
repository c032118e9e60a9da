"""Loaders of images decoded on demand (files and FFCV) or stored on the device: each augmented image is a function of
seed, epoch and image alone, evaluation shows every image once, damaged images are named and replaced."""

import multiprocessing
import pickle
from collections import Counter
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from ea_vision.base.errors import RunError
from ea_vision.data import imagenet, write_ffcv
from ea_vision.data.augment import Augmentation
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import GrowingSize, epoch_generator
from ea_vision.data.beton import Beton, Evaluated
from ea_vision.data.ffcv import BetonTrainLoader
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.imagenet import Decoder, ImageEvalLoader, ImageTrainLoader, train_transform
from ea_vision.data.on_device import EvalLoader, TrainLoader
from ea_vision.data.scaling import Scaling
from ea_vision.data.small_images import Images
from tests.data.photos import make_photos
from tests.data.test_image_files import pgm_of
from tests.refused import refused
from tests.slow import FFCV, needs_ffcv

COMMON = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25), "device": torch.device("cpu")}
DECODED = ["files", pytest.param("ffcv", marks=needs_ffcv)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def sources(photos):
    """40 training images by kind, and 13 files to evaluate on."""
    files = ImageFiles(photos / "train")
    out = photos / "train.beton"
    if FFCV:
        write_ffcv.write_beton(files, out)
    return {
        "files": files,
        "ffcv": FFCV and Beton(out),
        "device": small_images(40),
        "eval": ImageFiles(photos / "val"),
    }


def small_images(count, side=8):
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 10, list(map(str, range(count))))


def loader(source, kind, batch_size, **more):
    """Return a loader of 16-pixel images; images on the device may get their own augmentation."""
    more = {**COMMON, "seed": 1, "batch_size": batch_size, **more}
    if kind == "device":
        more.pop("workers", None)
        return TrainLoader(source, **{"augmentation": Augmentation(cutout=3), **more})
    more = {"img_size": 16, "workers": 0, "bad_images": BadImages(0), **more}
    if kind == "ffcv":
        return BetonTrainLoader(source, scale=(0.3, 1), hflip=0.5, **more)
    if kind == "eval":
        scaling = Scaling.cropped(more["img_size"], 20)
        return ImageEvalLoader(source, transform=lambda _: scaling.pixels, **more)
    policy = "rand-m7-mstd0.5-inc1"
    transform = partial(train_transform, scale=(0.3, 1), auto_augment=policy)
    return ImageTrainLoader(source, transform=transform, **more)


@pytest.mark.parametrize(
    "images, batch_size, processes, times", [(40, 4, 2, 3), (96, 3, 4, 3), (41, 5, 1, 4)]
)
def test_repeated_augmentation_is_timms(images, batch_size, processes, times):
    order = torch.randperm(images, generator=epoch_generator(5, 2))
    for rank in range(processes):
        there = {"rank": rank, "world_size": processes}
        share = loader(small_images(images), "device", batch_size, **there)
        used = len(share) * batch_size * processes
        assert torch.equal(share.repeated(order, 1)[0], order[:used])
        repeated, copies = share.repeated(order, times)
        indices_of_share = torch.cat([repeated[places] for places in share.train_places()])
        sampler = RepeatAugSampler(
            range(images), processes, rank, num_repeats=times, selected_round=0
        )
        sampler.set_epoch(epoch_generator(5, 2).initial_seed())
        assert indices_of_share.tolist() == list(sampler)[: len(indices_of_share)]
        counts = Counter(repeated.tolist())
        assert len(repeated) == used
        assert sorted(counts.values())[1:] == [times] * (len(counts) - 1)
        assert len(set(zip(repeated.tolist(), copies.tolist(), strict=True))) == used


def on_two(source, kind, epoch, first, **more):
    """Return an epoch's batches from batch `first` on, as seen by one process and by two processes together."""
    whole = list(loader(source, kind, 8, **more).batches(epoch))
    indices = []
    for rank in (0, 1):
        there = {"workers": 2, "rank": rank, "world_size": 2}
        part = loader(source, kind, 4, **there, **more)
        indices.append(part.batches(epoch, first))
    together = []
    for pair in zip(*indices, strict=True):
        together.append([torch.cat(both) for both in zip(*pair, strict=True)])
    return whole, together


@pytest.mark.parametrize("kind", [*DECODED, "device"])
def test_images_depend_on_seed_and_epoch_only(sources, kind):
    """Not on the number of workers or processes, the batch at which the epoch is entered, or loaders used before."""
    source = sources[kind]
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()
    used = loader(source, kind, 8)
    next(used.batches(0))
    again = list(used.batches(3))
    whole, halves = on_two(source, kind, 3, first=1)
    assert torch.equal(torch_state, torch.get_rng_state())
    np.testing.assert_equal(np.random.get_state(), numpy_state)
    assert len(whole) == 5
    for batch, both in zip(again[1:], halves, strict=True):
        assert all(map(torch.equal, batch, both))
    targets = torch.tensor(np.asarray(source.labels if kind == "ffcv" else source.targets))
    assert all(torch.equal(batch.targets, targets[batch.ids]) for batch in whole)
    ids = torch.cat([batch.ids for batch in whole])
    assert sorted(ids.tolist()) == list(range(40))
    other_epoch = next(used.batches(4))
    other_seed = next(loader(source, kind, 8, seed=2).batches(3))
    assert not torch.equal(other_epoch.ids, whole[0].ids)
    assert not torch.equal(other_seed.ids, whole[0].ids)


def distinct(images):
    return {image.numpy().tobytes() for image in images}


@pytest.mark.parametrize("kind", DECODED)
def test_repeated_images_are_augmented_differently_each_time(sources, kind):
    batches = list(loader(sources[kind], kind, 10, repeats=4).batches(3))
    ids = torch.cat([batch.ids for batch in batches])
    images = torch.cat([batch.images for batch in batches])
    assert ids.bincount()[ids.unique()].tolist() == [4] * 10
    for index in ids.unique():
        assert len(distinct(images[ids == index])) == 4
    whole, halves = on_two(sources[kind], kind, 1, first=2, repeats=3)
    # copies are of both processes
    for batch, (shown, _, numbers) in zip(whole[2:], halves, strict=True):
        assert sorted(batch.ids.tolist()) == sorted(numbers.tolist())
        assert kind != "files" or distinct(batch.images) == distinct(shown)


@pytest.mark.parametrize("kind", DECODED)
def test_images_have_the_size_of_their_epoch(sources, kind):
    grows = loader(sources[kind], kind, 8, size_of=GrowingSize(8, 16, 1, 2))
    for epoch, side in enumerate((8, 8, 16, 16)):
        batches = list(grows.batches(epoch, first=epoch))
        assert len(batches) == 5 - epoch
        for batch in batches:
            assert batch.images.shape == (8, 3, side, side)
    fixed = loader(sources[kind], kind, 8)
    assert torch.equal(next(grows.batches(3)).images, next(fixed.batches(3)).images)


def test_sizes_are_ffcvs():
    for first, last, start, end in ((160, 192, 65, 76), (128, 224, 2, 9), (100, 120, 0, 0)):
        size_of = GrowingSize(first, last, start, end)
        for epoch in range(90):  # ffcv-imagenet's get_resolution
            side = np.interp(epoch, [start, end], [first, last])
            expected = int(np.round(side / 32)) * 32
            if epoch >= end:
                expected = last
            elif epoch <= start:
                expected = first
            assert size_of(epoch) == expected


@pytest.mark.parametrize(
    "kind, images, world_size, batch_size",
    [("files", 13, 2, 5), ("files", 13, 4, 4), ("device", 13, 2, 5), ("device", 3, 4, 2)],
)
def test_evaluation_shows_every_image_once(sources, kind, images, world_size, batch_size):
    ids = []
    counts = set()
    for rank in range(world_size):
        there = {"rank": rank, "world_size": world_size}
        if kind == "device":
            share = EvalLoader(small_images(images), batch_size=batch_size, **there, **COMMON)
        else:
            share = loader(sources["eval"], "eval", batch_size, **there)
        batches = list(share.batches())
        counts.add(len(batches))
        for batch in batches:
            ids += batch.ids.tolist()
    assert len(counts) == 1, "as many batches for all: they ask each other before each"
    assert sorted(ids) == list(range(images))


def test_unreadable_images_are_named_and_replaced(tmp_path):
    train = make_photos(tmp_path) / "train"
    val = tmp_path / "val"
    (train / "class_0/000.jpg").write_text("no image", encoding="utf-8")
    (train / "class_0/001.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (val / "class_1/001.jpg").write_bytes((val / "class_1/001.jpg").read_bytes()[:300])
    (val / "class_1/large.png").write_bytes(pgm_of(11_000, 10_000))
    bad = BadImages(0)
    files = ImageFiles(train)
    for workers in (0, 1):
        batches = list(loader(files, "files", 8, bad_images=bad, workers=workers).batches(0))
        for batch in batches:
            assert len(batch.ids) == 8
            assert torch.equal(batch.targets, torch.from_numpy(files.targets)[batch.ids])
        ids = torch.cat([batch.ids for batch in batches])
        assert len(ids) == 40
        assert 0 not in ids
        assert 1 not in ids
    assert set(bad.new) == {files.describe(0), files.describe(1)}
    assert "UnidentifiedImageError" in str(bad.new)
    assert "No such file" in str(bad.new)
    evaluated = loader(ImageFiles(val), "eval", 5, bad_images=bad).batches()
    assert sum(len(batch.ids) for batch in evaluated) == 12
    too_large = bad.new[f"{val}/class_1/large.png"]
    assert too_large == "must have at most 100 megapixels, got 11000x10000"
    for path in train.rglob("*.jpg"):
        path.write_text("no image", encoding="utf-8")
    with refused(r"none of the 8 images of a batch can be read, such as .*\.jpg \(Un", RunError):
        next(loader(files, "files", 8).batches(0))


@pytest.mark.parametrize("kind", ["files", "eval", pytest.param("stored", marks=needs_ffcv)])
def test_what_workers_get_can_be_pickled(sources, tmp_path, kind):
    """So workers can be spawned; a .beton file is pickled as its path. The private decoder is what a worker gets."""
    if kind == "stored":
        stored = Evaluated(16, 20, "bilinear")
        path = tmp_path / "val.beton"
        write_ffcv.write_beton(sources["eval"], path, evaluated=stored)
        source = Beton(path, evaluated=stored)
        decoder = Decoder(source, torch.clone, (16, 16, 3))
    else:
        decoder = loader(sources[kind], kind, 8)._decoder(16)
    content = pickle.dumps(decoder)
    assert len(content) < 20_000
    keys = np.array([[7, 3], [8, 0]])
    images, targets, _ = decoder.__getitems__(keys)
    again = pickle.loads(content).__getitems__(keys)
    assert torch.equal(images, again[0])
    assert targets == again[1]


def test_alternating_flips_follow_each_image_through_the_epochs():
    """Images of two columns, numbered: every image is seen flipped in all even or in all odd epochs, on any process."""
    split = small_images(40, side=2)
    augmentation = Augmentation(flip="alternate", crop_padding=0)
    split.images[:] = torch.tensor([0, 255])

    def flipped(epoch, rank=0, world_size=1, first=0):
        there = {"rank": rank, "world_size": world_size}
        share = loader(split, "device", 8 // world_size, augmentation=augmentation, **there)
        flips = {}
        for batch in share.batches(epoch, first):
            for number, image in zip(batch.ids.tolist(), batch.images, strict=True):
                flips[number] = bool(image[0, 0, 0] > image[0, 0, 1])
        return flips

    epochs = list(map(flipped, range(4)))
    assert len(epochs[0]) == 40
    assert set(epochs[0].values()) == {False, True}
    for number, value in epochs[0].items():
        assert [e[number] for e in epochs] == [value, not value, value, not value]
    assert flipped(2, 0, 2) | flipped(2, 1, 2) == epochs[2], "as on one process"
    assert flipped(3, first=3).items() <= epochs[3].items(), "and from the middle of an epoch on"


@pytest.mark.parametrize(
    "method, workers", [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)]
)
def test_workers_start_once_for_all_epochs(sources, monkeypatch, method, workers):
    """Two epochs, of which one is left in its middle, and two evaluations start the workers of two loaders; the batches
    are those that this process decodes."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"processes cannot {method} here")
    monkeypatch.setattr(imagenet, "start_method", lambda: method)
    starts = []
    process = multiprocessing.get_context(method).Process
    start = process.start
    monkeypatch.setattr(process, "start", lambda self: starts.append(self) or start(self))

    def run(count):
        """Return the images of an epoch in part, an evaluation, an epoch and an evaluation."""
        train = loader(sources["files"], "files", 4, workers=count)
        evaluation = loader(sources["eval"], "eval", 5, workers=count)
        shown = []
        with closing(train), closing(evaluation):
            with closing(train.batches(0)) as part:
                shown.append(next(part).images)
            shown += [batch.images for batch in evaluation.batches()]
            shown += [batch.images for batch in train.batches(1, 3)]
            shown += [batch.images for batch in evaluation.batches()]
        return shown

    expected = run(0)
    assert not starts
    shown = run(workers)
    assert len(starts) == 2 * workers
    assert not any(worker.is_alive() for worker in starts)
    torch.testing.assert_close(shown, expected, atol=0, rtol=0)


def test_the_default_number_of_workers_fits_how_they_start(monkeypatch):
    monkeypatch.setattr(imagenet, "usable_cpus", lambda: 4)
    for method, images, expected in (
        ("fork", 40, 4),
        ("spawn", 900, 0),
        ("spawn", 2500, 2),
        ("spawn", 10**6, 4),
    ):
        monkeypatch.setattr(imagenet, "start_method", lambda method=method: method)
        assert loader(range(images), "files", 4, workers=-1).workers == expected
        assert loader(range(images), "files", 4, workers=3).workers == 3

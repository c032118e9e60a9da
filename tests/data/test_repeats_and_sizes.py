"""Repeated augmentation and growing images, by both loaders: each image r times, sizes as scheduled, wherever an epoch
is entered and whatever the number of processes."""
from __future__ import annotations

import importlib.util
from collections import Counter

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from ea_vision.data import write_ffcv
from ea_vision.data.bad_images import BadImages
from ea_vision.data.batches import GrowingSize, Share, epoch_generator, epoch_order, numbered_seed
from ea_vision.data.ffcv import BetonTrainLoader, open_beton
from ea_vision.data.imagenet import ImageSource, ImageTrainLoader, train_transform
from ea_vision.data.rand_augment import RandAugment
from ea_vision.data.threads import FileTrainLoader
from tests.data.photos import make_photos

COMMON = {"img_size": 32, "mean": (0.5,) * 3, "std": (0.2,) * 3, "device": torch.device("cpu"), "seed": 1}
KINDS = ["images", "threads", pytest.param("ffcv", marks=pytest.mark.skipif(importlib.util.find_spec("ffcv") is None,
                                                                 reason="needs FFCV: pip install .[ffcv]"))]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    photos = make_photos(tmp_path_factory.mktemp("photos"))
    source = ImageSource("", photos / "train", "train")
    found = {"images": source, "threads": source}
    if importlib.util.find_spec("ffcv"):
        out = photos / "train.beton"
        argv = ["--data-dir", str(photos), "--split", "train", "--out", str(out), "--jpeg-share", "0", "--workers", "1"]
        assert write_ffcv.main(argv) == 0
        found["ffcv"] = open_beton(out)
    return found


def loader(sources, kind: str, batch_size: int, size_of=None, **more):
    common = {**COMMON, "batch_size": batch_size, "bad_images": BadImages(0), "workers": 0, "size_of": size_of, **more}
    if kind != "images":
        common.update(scale=(0.3, 1), hflip=0.5, augment=RandAugment("rand-m7-mstd0.5-inc1", (0.5,) * 3))
        return (BetonTrainLoader(sources[kind], os_cache=True, **common) if kind == "ffcv" else
                FileTrainLoader(sources[kind], **common))

    def transform(size):
        return train_transform(size, scale=(0.3, 1), auto_augment="rand-m7-mstd0.5-inc1")

    return ImageTrainLoader(sources[kind], transform=transform if size_of else transform(32), **common)


@pytest.mark.parametrize("images, batch_size, processes, times", [(40, 4, 2, 3), (96, 3, 4, 3), (41, 5, 1, 4),
                                                                  (64, 8, 2, 2)])
def test_repeated_augmentation_is_timms(images, batch_size, processes, times):
    order = epoch_order(images, epoch_generator(5, 2))
    assert torch.equal(Share(images, batch_size, 0, processes).repeated(order, 1)[0], order)
    for rank in range(processes):
        share = Share(images, batch_size, rank, processes)
        repeated, copies = share.repeated(order, times)
        own = torch.cat([repeated[places] for places in share.train_places()])
        sampler = RepeatAugSampler(range(images), processes, rank, num_repeats=times, selected_round=0)
        sampler.set_epoch(numbered_seed(5, 2))
        assert own.tolist() == list(sampler)[:len(own)]
        counts = Counter(repeated.tolist())
        assert len(repeated) == images and sorted(counts.values())[1:] == [times] * (len(counts) - 1)
        assert len(set(zip(repeated.tolist(), copies.tolist(), strict=True))) == images


@pytest.mark.parametrize("kind", KINDS)
def test_each_image_is_shown_so_many_times_each_time_otherwise(sources, kind):
    batches = list(loader(sources, kind, 10, repeats=4).batches(3))
    ids, images = torch.cat([b.ids for b in batches]), torch.cat([b.images for b in batches])
    targets = torch.cat([b.targets for b in batches])
    assert set(Counter(ids.tolist()).values()) == {4} and len(ids) == 40
    for index in ids.unique():
        copies = images[ids == index]
        assert len({copy.numpy().tobytes() for copy in copies}) == 4
        assert len(targets[ids == index].unique()) == 1
    others = torch.cat([b.ids for b in loader(sources, kind, 10, repeats=4).batches(4)])
    assert set(ids.tolist()) != set(others.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_see_together_what_one_sees_wherever_they_enter(sources, kind):
    whole = list(loader(sources, kind, 8, repeats=3).batches(1))
    halves = [list(loader(sources, kind, 4, repeats=3, rank=rank, world_size=2).batches(1, first=2)) for rank in (0, 1)]
    plain = [list(loader(sources, kind, 4, rank=rank, world_size=2).batches(1, first=2)) for rank in (0, 1)]
    for batch, *parts in zip(list(loader(sources, kind, 8).batches(1))[2:], *plain, strict=True):
        assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
    for batch, *parts in zip(whole[2:], *halves, strict=True):  # the copies of an image are of different processes
        assert sorted(batch.ids.tolist()) == sorted(torch.cat([part.ids for part in parts]).tolist())
        seen = [{i.numpy().tobytes() for i in b.images} for b in (batch, *parts)]
        assert kind != "images" or seen[0] == seen[1] | seen[2]


def test_sizes_are_ffcvs():
    for first, last, start, end in ((160, 192, 65, 76), (160, 192, 11, 13), (128, 224, 2, 9), (100, 120, 0, 0)):
        size_of = GrowingSize(first, last, start, end)
        for epoch in range(90):
            wanted = first if epoch <= start else last if epoch >= end else None
            if epoch == start == end:
                wanted = last
            if wanted is None:
                wanted = int(np.round(np.interp([epoch], [start, end], [first, last])[0] / 32)) * 32
            assert size_of(epoch) == wanted
        sizes = [size_of(epoch) for epoch in range(90)]
        assert sizes == sorted(sizes) and sizes[-1] == last


@pytest.mark.parametrize("kind", KINDS)
def test_images_have_the_size_of_their_epoch(sources, kind):
    grows = loader(sources, kind, 8, size_of=GrowingSize(16, 32, 1, 3))
    for epoch, side in enumerate((16, 16, 32, 32)):
        batches = list(grows.batches(epoch, first=epoch))
        assert len(batches) == 5 - epoch and all(b.images.shape == (8, 3, side, side) for b in batches)
    fixed = next(loader(sources, kind, 8).batches(3))
    assert torch.equal(next(grows.batches(3)).images, fixed.images)

"""Loaders: order and augmentation are functions of seed and epoch; evaluation shows every image once; all is quick."""
from __future__ import annotations

import pytest
import torch

from ea_vision.data.augment import Augmentation
from ea_vision.data.on_device import EvalLoader, TrainLoader
from ea_vision.data.small_images import Images

COMMON = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "device": torch.device("cpu")}


def images(count: int, side: int = 8) -> Images:
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 10, [str(i) for i in range(count)])


def train_loader(split, batch_size, rank=0, world_size=1, seed=0, **augmentation):
    return TrainLoader(split, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed,
                       augmentation=Augmentation(**augmentation or {"cutout": 3}), **COMMON)


def test_two_processes_see_together_what_one_sees_with_twice_the_batch_wherever_an_epoch_is_entered():
    split = images(53)
    whole = list(train_loader(split, 8).batches(3))
    halves = [list(train_loader(split, 4, rank, 2).batches(3, first=2)) for rank in (0, 1)]
    assert len(whole) == 6 and len(halves[0]) == len(halves[1]) == 4
    for batch, *parts in zip(whole[2:], *halves, strict=True):
        assert all(torch.equal(one, torch.cat(two)) for one, two in zip(batch, zip(*parts, strict=True), strict=True))


def test_epochs_and_seeds_differ_and_each_shows_every_image_once():
    split, orders = images(40), []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        batches = list(train_loader(split, 8, seed=seed).batches(epoch))
        ids = torch.cat([b.ids for b in batches])
        assert sorted(ids.tolist()) == list(range(40))
        assert torch.equal(torch.cat([b.targets for b in batches]), split.targets[ids])
        orders.append(tuple(ids.tolist()))
    assert len(set(orders)) == 3


def test_alternating_flips_follow_each_image_through_the_epochs():
    """Images of two columns, numbered: every image is seen flipped in all even or in all odd epochs, on any process."""
    split = images(40, side=2)
    split.images[:] = torch.tensor([0, 255])

    def flipped(epoch, rank=0, world_size=1, first=0):
        loader = train_loader(split, 8 // world_size, rank, world_size, flip="alternate", crop_padding=0)
        return {number: bool(image[0, 0, 0] > image[0, 0, 1]) for batch in loader.batches(epoch, first)
                for number, image in zip(batch.ids.tolist(), batch.images, strict=True)}

    epochs = list(map(flipped, range(4)))
    assert len(epochs[0]) == 40 and set(epochs[0].values()) == {False, True}
    for number, value in epochs[0].items():
        assert [e[number] for e in epochs] == [value, not value, value, not value]
    assert flipped(2, 0, 2) | flipped(2, 1, 2) == epochs[2], "as on one process"
    assert flipped(3, first=3).items() <= epochs[3].items(), "and from the middle of an epoch on"


@pytest.mark.parametrize("count, world_size, batch_size", [(13, 1, 5), (13, 2, 5), (13, 4, 2), (3, 4, 2), (16, 4, 2)])
def test_evaluation_shows_every_image_once_on_any_number_of_processes(count, world_size, batch_size):
    split = images(count)
    loaders = [EvalLoader(split, batch_size=batch_size, rank=rank, world_size=world_size, **COMMON)
               for rank in range(world_size)]
    batches = [list(loader.batches()) for loader in loaders]
    assert {len(b) for b in batches} == {len(loaders[0])}, "as many batches for all: they ask each other before each"
    ids = torch.cat([b.ids for of_rank in batches for b in of_rank])
    assert sorted(ids.tolist()) == list(range(count))

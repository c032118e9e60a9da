"""Batches of images with boxes: the same wherever an epoch is entered, and without images that cannot be read."""
from functools import partial

import pytest
import torch

from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.loaders import BoxEvalLoader, BoxTrainLoader
from ea_vision.detection.transforms import eval_transform, train_transform
from tests.detection.boxes import box_loader, make_boxes


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """9 training images of 48 pixels, of which the one numbered 5 cannot be read."""
    root = tmp_path_factory.mktemp("data") / "boxes"
    make_boxes(root, img_size=48, sizes=(8, 24), train=9)
    source = CocoFolder(root, "train")
    (source.folder / source.images[5]["file_name"]).write_bytes(b"no image")
    return source


def train(source, **options):
    return box_loader(BoxTrainLoader, source, partial(train_transform, photometric=True), **options)


def same(a, b) -> bool:
    return torch.equal(a.images, b.images) and torch.equal(a.ids, b.ids) and all(
        torch.equal(x[key], y[key]) for x, y in zip(a.targets, b.targets, strict=True) for key in ("boxes", "labels"))


def test_an_epoch_is_the_same_from_wherever_it_is_entered_and_by_any_workers(data):
    state = torch.get_rng_state()
    whole = list(train(data).batches(4))
    assert torch.equal(state, torch.get_rng_state()), "the trainer's own random state"
    assert len(whole) == 3 and all(batch.images.shape == (3, 3, 32, 32) for batch in whole)
    for batch in whole:
        assert batch.images.dtype == torch.float32 and 0 <= batch.images.min() and batch.images.max() <= 1
        assert all(len(t["boxes"]) == len(t["labels"]) and t["boxes"].shape[1:] == (4,) for t in batch.targets)
    assert all(map(same, whole[1:], train(data, workers=2).batches(4, 1)))
    assert not same(whole[0], next(train(data).batches(5)))


def test_an_unreadable_image_is_replaced_in_training_and_left_out_in_evaluation(data):
    training = train(data)
    ids = [index for batch in training.batches(0) for index in batch.ids.tolist()]
    assert 5 not in ids and len(ids) == 9 and set(ids) | {5} == set(range(9))
    assert list(training.bad_images.new) == [data.describe(5)]
    batches = list(box_loader(BoxEvalLoader, data, eval_transform).batches())
    assert [batch.ids.tolist() for batch in batches] == [[0, 1, 2], [3, 4], [6, 7, 8]]
    assert [len(batch.images) for batch in batches] == [len(batch.targets) for batch in batches] == [3, 2, 3]
    [target] = [t for batch in batches for t, index in zip(batch.targets, batch.ids.tolist(), strict=True)
                if index == 6]
    assert target["image_id"] == data.images[6]["id"] and tuple(target["size"]) == (48, 48)

"""Batches of images with boxes: the same wherever an epoch is entered, and without images that cannot be read."""

import pickle

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ea_vision.detection.coco import CocoFolder
from ea_vision.detection.loaders import BoxTrainLoader
from ea_vision.detection.transforms import train_transform
from tests.detection.boxes import box_loader, make_boxes


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """9 training images, of which the one numbered 5 cannot be read."""
    root = tmp_path_factory.mktemp("data") / "boxes"
    make_boxes(root, train=9)
    source = CocoFolder(root, "train")
    (source.folder / "5.png").write_bytes(b"no image")
    return source


def train(source, **options):
    return box_loader(BoxTrainLoader, source, train_transform, **options)


def test_an_epoch_is_the_same_from_wherever_it_is_entered_by_any_workers_and_without_broken_images(
    data,
):
    state = torch.get_rng_state()
    loader = train(data)
    whole = list(loader.batches(4))
    assert torch.equal(state, torch.get_rng_state()), "the trainer's own random state"
    assert len(whole) == 3
    for batch in whole:
        assert batch.images.shape == (3, 3, 32, 32)
        assert batch.images.dtype == torch.float32
        assert 0 <= batch.images.min()
        assert batch.images.max() <= 1
        assert [t["image_id"] for t in batch.targets] == (batch.ids + 1).tolist()
    ids = torch.cat([batch.ids for batch in whole])
    assert set(ids.tolist()) == set(range(9)) - {5}
    assert list(loader.bad_images.new) == [data.describe(5)]
    assert_close(list(train(data, workers=2).batches(4, 1)), whole[1:], rtol=0, atol=0)
    other = next(train(data).batches(5))
    assert not torch.equal(other.images, whole[0].images)


def test_what_workers_get_can_be_pickled(data):
    """So they may start by spawn. The private decoder is what a worker gets."""
    decoder = train(data)._decoder(32)
    again = pickle.loads(pickle.dumps(decoder))
    keys = np.array([[7, 3], [8, 5]])
    *decoded, bad = decoder.__getitems__(keys)
    *same, _ = again.__getitems__(keys)
    assert bad.keys() == {1}
    assert_close(same, decoded, rtol=0, atol=0)

"""RandAugment on batches: each operation against timm's own on the same image, and draws that hang on places alone."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP, rand_augment_transform

from ea_vision.base.errors import UsageError
from ea_vision.data.batches import Share
from ea_vision.data.rand_augment import OPERATIONS, Draws, RandAugment

FILL = (124.0, 116.0, 104.0)
# Mean difference from timm's pixels, of 255: where torchvision rounds otherwise than Pillow, resamples at the border of
# what is uncovered, or moves by whole pixels.
APART = {"Rotate": 2.5, "ShearX": 2.5, "ShearY": 2.5, "TranslateXRel": 2.5, "TranslateYRel": 2.5}


def photo(side: int = 64) -> Image.Image:
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(30, 220, (9, 9, 3), dtype=np.uint8))
    return small.resize((side, side), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("level", [3.0, 7.0])
def test_operations_are_timms(name, level, monkeypatch):
    image = photo()
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    directed, function = OPERATIONS[name]
    for negative in (False, True) if directed else (False,):
        monkeypatch.setattr(random, "random", lambda negative=negative: float(negative))  # timm negates above 0.5
        arguments = () if LEVEL_TO_ARG[name] is None else LEVEL_TO_ARG[name](level, {"translate_pct": 0.45})
        wanted = NAME_TO_OP[name](image, *arguments, fillcolor=tuple(map(int, FILL)), resample=Image.BILINEAR)
        found = function(pixels, level / 10, -1 if negative else 1, list(FILL))[0].permute(1, 2, 0).numpy()
        apart = np.abs(found.astype(int) - np.asarray(wanted).astype(int)).mean()
        assert apart <= APART.get(name, 0.6), (negative, apart)


def test_an_image_gets_what_it_drew_whoever_is_beside_it():
    augment = RandAugment("rand-m7-mstd0.5-inc1", (0.485, 0.456, 0.406))
    images = torch.stack([torch.from_numpy(np.array(photo(32).rotate(9 * n))).permute(2, 0, 1) for n in range(24)])
    draws = next(augment.draws(24, 0, 3, Share(24, 24)))
    together = augment.apply(images, draws)
    for place in range(24):
        own = Draws(draws.operations[place:place + 1], draws.negative[place:place + 1], draws.magnitudes)
        assert torch.equal(augment.apply(images[place:place + 1], own)[0], together[place])
    untouched = (draws.operations < 0).all(1)
    assert untouched.any() and torch.equal(together[untouched], images[untouched])
    assert not torch.equal(together[~untouched], images[~untouched])


def test_draws_are_a_function_of_the_place():
    augment = RandAugment("rand-m6-mstd0.5-inc1", (0.5,) * 3)
    whole = list(augment.draws(40, 1, 2, Share(40, 8)))
    halves = [list(augment.draws(40, 1, 2, Share(40, 4, rank, 2), first=1)) for rank in (0, 1)]
    assert len(whole) == 5
    for drawn, first, second in zip(whole[1:], *halves, strict=True):
        assert torch.equal(drawn.operations, torch.cat([first.operations, second.operations]))
        assert torch.equal(drawn.negative, torch.cat([first.negative, second.negative]))
        assert torch.equal(drawn.magnitudes, first.magnitudes) and torch.equal(drawn.magnitudes, second.magnitudes)
    assert not torch.equal(next(augment.draws(40, 1, 3, Share(40, 8))).operations, whole[0].operations)


def test_operations_are_drawn_as_often_as_timms():
    policy = rand_augment_transform("rand-m7-mstd0.5-inc1", {"translate_const": 10})
    augment = RandAugment("rand-m7-mstd0.5-inc1", (0.5,) * 3)
    assert augment.names == [op.name for op in policy.ops] and augment.layers == 2
    drawn = next(augment.draws(30000, 0, 0, Share(30000, 30000)))
    share = torch.stack([(drawn.operations == number).float().mean() for number in range(-1, 15)])
    assert share[0] == pytest.approx(0.5, abs=0.01) and (share[1:] - 0.5 / 15).abs().max() < 0.003
    many = torch.cat([d.magnitudes.flatten() for d in augment.draws(30000, 0, 0, Share(30000, 100))])
    assert many.mean() == pytest.approx(7, abs=0.02) and many.std() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("policy", ["original", "rand-m7-q3", "augmix-m3", "rand-m9-tweights", "rand-m9-t3a", ""])
def test_other_policies_are_refused(policy):
    with pytest.raises(UsageError, match="aa: a policy of .* is required over FFCV files"):
        RandAugment(policy, (0.5,) * 3)

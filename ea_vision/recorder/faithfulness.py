"""Whether the class of an image hangs on the patches that a ranking puts first: what is left of the class's probability
without them, and with them alone.

An image is cut into a grid of N patches. x is the whole image, p(.) the probability of the class that the network
predicts on x, and a ranking an order of the patches, such as an attention map's. A share r of the patches are
max(1, round(r N)) of them; a removed patch shows a filling (the training images' mean colour, or the image blurred).

    comprehensiveness   p(x) - p(x without the first r), mean over the shares 1, 5, 10, 20, 50%: high is faithful
    sufficiency         p(x) - p(the first r alone), mean over the same shares: low is faithful
    deletion            area under p as patches are removed in order, over the share removed: low is faithful
    insertion           area under p as patches are put into the filling in order: high is faithful

Patches that a ranking leaves alike stand in a random order, drawn once by a seed for each image: a uniform map is the
random ranking.

* Comprehensiveness, sufficiency: `ERASER` (DeYoung et al. 2020) - https://arxiv.org/abs/1911.03429; EA paper, table 8
* Deletion, insertion: `RISE` (Petsiuk et al. 2018) - https://arxiv.org/abs/1806.07421

Shape letters: M images, B a batch of them, h x w the grid, N = h*w its patches (row-major), S counts of patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur
from tqdm import tqdm

from ea_vision.base.files import csv_text
from ea_vision.base.tables import markdown

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # EA paper, table 8, and ERASER
FILLINGS = ("mean", "blur")
SCORES = ("comprehensiveness", "sufficiency", "deletion", "insertion")

Predict = Callable[[Tensor], Tensor]  # (B, 3, H, W) in 0..1 -> logits (B, classes)
Source = Callable[[Tensor, Tensor], Mapping[str, Tensor]]  # images, classes (B,) -> scores (B, any h, any w) by name


def counts_of(shares: Sequence[float], patches: int) -> list[int]:
    """How many patches each share of them is, at least one."""
    return [max(1, round(share * patches)) for share in shares]


@dataclass
class Curves:
    """What a ranking leaves of the probability of the class predicted on the whole image.

    ranking: its name. counts: of patches, rising. patches: N. bins: the count of each share, with repetitions.
    whole, empty: (M,), on the whole image, and with all patches removed.
    removed, kept: (M, S), without the first patches, and with these alone.
    """

    ranking: str
    counts: tuple[int, ...]
    patches: int
    bins: tuple[int, ...]
    whole: Tensor
    empty: Tensor
    removed: Tensor
    kept: Tensor

    def comprehensiveness(self) -> Tensor:
        """(M,); high is faithful."""
        return self.whole - self._over_bins(self.removed)

    def sufficiency(self) -> Tensor:
        """(M,); low is faithful."""
        return self.whole - self._over_bins(self.kept)

    def deletion(self) -> Tensor:
        """(M,), in 0..1; low is faithful."""
        return torch.trapezoid(self._at_shares("deletion"), torch.tensor(self.shares()), dim=1)

    def insertion(self) -> Tensor:
        """(M,), in 0..1; high is faithful."""
        return torch.trapezoid(self._at_shares("insertion"), torch.tensor(self.shares()), dim=1)

    def shares(self) -> list[float]:
        """Of the patches, from none to all of them: the places of `curve`."""
        return [0.0, *(count / self.patches for count in self.counts), 1.0]

    def curve(self, score: str) -> list[float]:
        """Of "deletion" or "insertion": mean over images at each of `shares`."""
        return self._at_shares(score).mean(0).tolist()

    def _over_bins(self, probabilities: Tensor) -> Tensor:
        return probabilities[:, [self.counts.index(count) for count in self.bins]].mean(1)

    def _at_shares(self, score: str) -> Tensor:
        parts = {"deletion": (self.whole, self.removed, self.empty), "insertion": (self.empty, self.kept, self.whole)}
        return torch.cat([part.view(len(self.whole), -1) for part in parts[score]], dim=1)


def row_of(model: str, curves: Curves) -> dict[str, Any]:
    """A line of results.csv: model, ranking, the mean of each score over images and its standard error (which for one
    image is not a number), images."""
    values: dict[str, Any] = {"model": model, "ranking": curves.ranking}
    for name in SCORES:
        score = getattr(curves, name)().double()
        values[name] = score.mean().item()
        values[f"{name}_se"] = score.std().item() / math.sqrt(len(score)) if len(score) > 1 else math.nan
    return {**values, "images": len(curves.whole)}


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    return csv_text([{name: f"{value:.6f}" if isinstance(value, float) else value for name, value in row.items()}
                     for row in rows])


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a model and ranking, a column a score with its standard error."""
    cells = [[row["model"], row["ranking"], *(f"{row[name]:.4f} ± {row[f'{name}_se']:.4f}" for name in SCORES)]
             for row in rows]
    return markdown([["model", "ranking", *SCORES], *cells])


def filled(images: Tensor, filling: str, mean: Sequence[float], grid: tuple[int, int]) -> Tensor:
    """The images with all patches removed.

    Args:
        images: (B, 3, H, W) in 0..1.
        filling: "mean": the colour `mean`, (3,); "blur": the image under a Gaussian as wide (sigma) as a patch's
            longer side.
        grid: (h, w).

    Raises:
        ValueError: another filling.
    """
    if filling == "mean":
        return torch.tensor(mean, dtype=images.dtype, device=images.device).view(1, 3, 1, 1).expand_as(images)
    if filling == "blur":
        H, W = images.shape[-2:]
        sigma = max(H / grid[0], W / grid[1])
        sides = [2 * min(math.ceil(2 * sigma), size - 1) + 1 for size in (W, H)]
        return gaussian_blur(images, sides, [sigma, sigma])
    raise ValueError(f"filling must be one of {', '.join(FILLINGS)}, got {filling!r}")


def patch_numbers(grid: tuple[int, int], img_size: tuple[int, int]) -> Tensor:
    """(H, W): the patch that each pixel belongs to, counted row by row from 0.

    Raises:
        ValueError: more patches than pixels along a side.
    """
    if any(not 0 < patches <= pixels for patches, pixels in zip(grid, img_size, strict=True)):
        raise ValueError(f"patches must be 1 to {img_size[0]} by 1 to {img_size[1]} in an image of as many pixels, "
                         f"got {grid[0]} by {grid[1]}")
    rows, cols = (torch.arange(pixels) * patches // pixels for patches, pixels in zip(grid, img_size, strict=True))
    return rows[:, None] * grid[1] + cols


def order_of(scores: Tensor, grid: tuple[int, int], ties: Tensor) -> Tensor:
    """(B, N): the patches by falling score.

    Args:
        scores: (B, h', w'), of any size: resized to the grid, bilinearly.
        ties: (B, N), a random order of the patches, in which those of the same score stay.
    """
    if scores.shape[1:] != grid:
        scores = F.interpolate(scores[:, None].float(), grid, mode="bilinear", antialias=True)[:, 0]
    scores = scores.flatten(1).cpu().gather(1, ties)
    return ties.gather(1, scores.argsort(dim=1, descending=True, stable=True))


def measure_rankings(predict: Predict, images: Tensor, sources: Sequence[Source], grid: tuple[int, int], *,
                     mean: Sequence[float], filling: str = "mean", shares: Sequence[float] = SHARES, steps: int = 10,
                     batch_size: int = 64, seed: int = 0, device: str | torch.device = "cpu",
                     name: str = "") -> list[Curves]:
    """Remove patches in the order of rankings, and see what the network makes of the rest.

    Each ranking takes two forwards an image for each of about len(shares) + steps - 1 counts.

    Args:
        predict: from images to logits.
        images: uint8 (M, 3, H, W).
        sources: of rankings; those of one source share its work.
        grid: (h, w) of the patches.
        mean: colour that fills, where the filling is "mean".
        filling: see `filled`.
        shares: of the patches, for comprehensiveness and sufficiency, in 0..1.
        steps: equal steps of the curves of deletion and insertion, to which the shares add theirs.
        batch_size: images at a time.
        seed: of the order of patches that a ranking leaves alike.
        device: where `predict` wants its images.
        name: for the progress bar.

    Returns:
        curves by ranking, in the order of the sources.

    Raises:
        ValueError: no images, or values that cannot be.
    """
    if not len(images) or steps < 1 or not all(0 < share <= 1 for share in shares):
        raise ValueError("at least one image and one step and shares above 0 and at most 1 are required, got "
                         f"{len(images)} images, {steps} steps and shares {tuple(shares)}")
    N = grid[0] * grid[1]
    cells = patch_numbers(grid, tuple(images.shape[-2:])).to(device)
    bins = counts_of(shares, N)
    between = {round(step * N / steps) for step in range(1, steps)}
    counts = sorted({*bins, *between} - {0})
    generator = torch.Generator().manual_seed(seed)
    ties = torch.stack([torch.randperm(N, generator=generator) for _ in range(len(images))])
    bases, found = [], {}
    for index in tqdm(torch.arange(len(images)).split(batch_size), desc=name, unit="batch", disable=None):
        batch = images[index].to(device) / 255
        filling_images = filled(batch, filling, mean, grid)
        with torch.no_grad():  # sources may differentiate what comes of this
            whole = predict(batch).float().softmax(-1)
            classes = whole.argmax(-1)
            chosen = torch.arange(len(batch)), classes
            bases.append((whole[chosen].cpu(), predict(filling_images).float().softmax(-1)[chosen].cpu()))
        for source in sources:
            for ranking, scores in source(batch, classes).items():
                place = order_of(scores, grid, ties[index]).argsort(1).to(device)[:, cells]  # (B, H, W), in the order
                probabilities = torch.empty(2, len(batch), len(counts))
                for number, count in enumerate(counts):
                    first = (place < count)[:, None]
                    for kept in (False, True):
                        shown = torch.where(first == kept, batch, filling_images)
                        with torch.no_grad():
                            probabilities[int(kept), :, number] = predict(shown).float().softmax(-1)[chosen].cpu()
                found.setdefault(ranking, []).append(probabilities)
    whole, empty = (torch.cat(parts) for parts in zip(*bases, strict=True))
    return [Curves(ranking, tuple(counts), N, tuple(bins), whole, empty, *torch.cat(parts, dim=1))
            for ranking, parts in found.items()]

"""Faithfulness of attention: how the prediction changes when ranked patches are removed.

    python -m experiments.faithfulness --model runs/aa,runs/ea --dataset cifar10 --data-dir DIR -o faithfulness
    python -m experiments.faithfulness --limit 50                                                # on digits, a minute

An image is cut into a grid of N patches. x is the whole image, p(.) the probability of the class that the network
predicts on x, and a ranking an order of the patches, such as an attention map's. A share r of the patches are
max(1, round(r N)) of them; a removed patch shows the training images' mean colour.

    comprehensiveness   p(x) - p(x without the first r), mean over the shares 1, 5, 10, 20, 50%: high is faithful
    sufficiency         p(x) - p(the first r alone), mean over the same shares: low is faithful
    deletion            area under p as patches are removed in order, over the share removed: low is faithful
    insertion           area under p as patches are put into an image of that colour: high is faithful

Patches that a ranking leaves alike stand in a random order, drawn once by a seed for each image: a uniform map is the
random ranking. Written: results.csv (means over images and their standard errors), curves.csv and results.png.

* Comprehensiveness, sufficiency: `ERASER` (DeYoung et al. 2020) - https://arxiv.org/abs/1911.03429; EA paper, table 8
* Deletion, insertion: `RISE` (Petsiuk et al. 2018) - https://arxiv.org/abs/1806.07421

Shape letters: M images, B a batch of them, h x w the grid, N = h*w its patches (row-major), S counts of patches.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import ea_vision
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.data.small_images import load_dataset
from ea_vision.recorder.loading import LoadedModel, load_model
from ea_vision.recorder.probe import untrained_network
from ea_vision.recorder.quantities import attention_rollout
from ea_vision.recorder.recording import prefix_names

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # EA paper, table 8, and ERASER
SCORES = ("comprehensiveness", "sufficiency", "deletion", "insertion")
RANKINGS = (
    "layers",
    "rollout",
    "random",
    "centre",
    "gradient",
    "untrained-layers",
    "untrained-rollout",
)

Predict = Callable[[Tensor], Tensor]  # (B, 3, H, W) in 0..1 -> logits (B, classes)
Source = Callable[
    [Tensor, Tensor], Mapping[str, Tensor]
]  # images, classes (B,) -> scores (B, any h, any w) by name


@dataclass
class Curves:
    """What a ranking leaves of the probability of the class predicted on the whole image.

    counts: of patches, rising. patches: N. bins: the count of each of SHARES, with repetitions. whole, empty: (M,), on
    the whole image, and with all patches removed. removed, kept: (M, S), without the first patches, these alone.
    """

    ranking: str
    counts: tuple[int, ...]
    patches: int
    bins: tuple[int, ...]
    whole: Tensor
    empty: Tensor
    removed: Tensor
    kept: Tensor

    def scores(self) -> dict[str, Tensor]:
        """Return each of SCORES by image, (M,)."""
        bins, shares = (
            [self.counts.index(count) for count in self.bins],
            torch.tensor(self.shares()),
        )
        return {
            "comprehensiveness": self.whole - self.removed[:, bins].mean(1),
            "sufficiency": self.whole - self.kept[:, bins].mean(1),
            "deletion": torch.trapezoid(self.curve("deletion"), shares, dim=1),
            "insertion": torch.trapezoid(self.curve("insertion"), shares, dim=1),
        }

    def shares(self) -> list[float]:
        """Return the shares of the patches, from none to all of them: the places of `curve`."""
        return [0.0, *(count / self.patches for count in self.counts), 1.0]

    def curve(self, score: str) -> Tensor:
        """Return the probabilities of "deletion" or "insertion" at each of `shares`, (M, S + 2)."""
        first, middle, last = (
            (self.whole, self.removed, self.empty)
            if score == "deletion"
            else (self.empty, self.kept, self.whole)
        )
        return torch.cat([first[:, None], middle, last[:, None]], dim=1)

    def row(self) -> dict[str, float]:
        """Return the mean of each score over images and its standard error."""
        found = {}
        for name, score in self.scores().items():
            found |= {
                name: score.double().mean().item(),
                f"{name}_se": score.double().std().item() / len(score) ** 0.5,
            }
        return {"ranking": self.ranking, **found, "images": len(self.whole)}


def order_of(scores: Tensor, grid: tuple[int, int], ties: Tensor) -> Tensor:
    """Return the patches by falling score, (B, N).

    Args:
        scores: (B, h', w'), of any size: resized to the grid, bilinearly.
        ties: (B, N), a random order of the patches, in which those of the same score stay.
    """
    if scores.shape[1:] != grid:
        scores = F.interpolate(scores[:, None].float(), grid, mode="bilinear", antialias=True)[:, 0]
    return ties.gather(
        1, scores.flatten(1).cpu().gather(1, ties).argsort(dim=1, descending=True, stable=True)
    )


@torch.no_grad()
def measure(
    predict: Predict,
    images: Tensor,
    sources: Sequence[Source],
    grid: tuple[int, int],
    *,
    mean: Sequence[float],
    steps: int = 10,
    batch_size: int = 64,
    seed: int = 0,
) -> list[Curves]:
    """Remove patches in the order of rankings, and see what the network makes of the rest.

    Args:
        images: uint8 (M, 3, H, W).
        sources: of rankings; those of one source share its work.
        grid: (h, w) of the patches, at most one a pixel.
        mean: the colour of removed patches.
        steps: equal steps of the curves of deletion and insertion, to which SHARES add theirs.
        seed: of the order of patches that a ranking leaves alike.
    """
    N, (H, W) = grid[0] * grid[1], images.shape[-2:]
    cells = (torch.arange(H) * grid[0] // H)[:, None] * grid[1] + torch.arange(W) * grid[
        1
    ] // W  # (H, W)
    bins = [max(1, round(share * N)) for share in SHARES]
    counts = sorted({*bins, *(round(step * N / steps) for step in range(1, steps))} - {0})
    generator = torch.Generator().manual_seed(seed)
    ties = torch.stack([torch.randperm(N, generator=generator) for _ in range(len(images))])
    bases, found = [], {}
    for index in tqdm(torch.arange(len(images)).split(batch_size), unit="batch", disable=None):
        batch = images[index] / 255
        nothing = torch.tensor(mean).to(batch).view(1, 3, 1, 1).expand_as(batch)
        whole = predict(batch).float().softmax(-1)
        classes = whole.argmax(-1)
        chosen = torch.arange(len(batch)), classes
        bases.append((whole[chosen].cpu(), predict(nothing).float().softmax(-1)[chosen].cpu()))
        for ranking, scores in [
            item for source in sources for item in source(batch, classes).items()
        ]:
            place = order_of(scores, grid, ties[index]).argsort(1)[
                :, cells
            ]  # (B, H, W), in the order
            left = []
            for kept, count in product((False, True), counts):
                shown = torch.where((place < count)[:, None] == kept, batch, nothing)
                left.append(predict(shown).float().softmax(-1)[chosen].cpu())
            found.setdefault(ranking, []).append(
                torch.stack(left).unflatten(0, (2, len(counts))).transpose(1, 2)
            )
    whole, empty = (torch.cat(parts) for parts in zip(*bases, strict=True))
    return [
        Curves(ranking, tuple(counts), N, tuple(bins), whole, empty, *torch.cat(parts, dim=1))
        for ranking, parts in found.items()
    ]


def attention_source(
    model: LoadedModel,
    layers: Sequence[int],
    kinds: Sequence[str] = ("layers", "rollout"),
    note: str = "",
) -> Source:
    """Return the source of rankings by attention maps: what a layer's queries look at together.

    That is what the class token looks at where the classifier reads it, else the mean of what all patches look at.

    Args:
        model: whose maps they are; it need not be the network that is asked for probabilities.
        layers: numbers of those that rank patches; a rollout goes through all that the model has.
        kinds: "layers": "layer 3", the mean of its heads; "rollout".
        note: is added to the rankings' names.
    """
    cls = "cls" in prefix_names(model.model) and getattr(model.model, "global_pool", "") == "token"

    def looked_at(maps: Tensor, queries, keys) -> Tensor:
        """(B, T', T) -> (B, h, w): the patches among the keys, as the class token or all patches see them."""
        if cls and "cls" in queries.prefix_names:
            seen = maps[:, queries.token("cls")]
        else:  # also of a network whose class token comes in later (CaiT)
            queries.check_pixels_ask()
            seen = maps[:, queries.num_prefix_tokens :].mean(1)
        pooled = maps.shape[-1] == keys.num_prefix_tokens + math.prod(keys.key_size)
        return (
            seen[..., keys.num_prefix_tokens :]
            .unflatten(-1, keys.key_size if pooled else keys.feat_size)
            .float()
        )

    def source(images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
        with (
            torch.no_grad(),
            ea_vision.record_attention(
                model.model, None if "rollout" in kinds else list(layers)
            ) as maps,
        ):
            model.model(model.normalize(images))
        scores = {}
        if "layers" in kinds:
            scores = {
                f"layer {number}{note}": looked_at(
                    maps[number].attn.mean(1), maps[number], maps[number]
                )
                for number in layers
            }
        if "rollout" in kinds:
            first, *_, last = maps.values()
            scores[f"rollout{note}"] = looked_at(attention_rollout(maps), last, first)
        return scores

    return source


def random_source(images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
    """Return all patches alike, which leaves them in their random order."""
    return {"random": torch.zeros(len(images), 1, 1)}


def centre_source(grid: tuple[int, int], images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
    """Rank the patches nearer to the middle of the image first: what a map must know more than."""
    rows, cols = ((torch.arange(size) + 0.5) / size - 0.5 for size in grid)
    return {"centre": -(rows[:, None] ** 2 + cols**2).expand(len(images), -1, -1)}


def gradient_source(
    predict: Predict, mean: Sequence[float], grid: tuple[int, int], images: Tensor, classes: Tensor
) -> Mapping[str, Tensor]:
    """Rank by what the class's log-probability loses without a patch, to first order: gradient times (image - mean
    colour), summed over the patch. It knows the network, not only its maps: a ranking to measure others by."""
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        logits = predict(images).float().log_softmax(-1)
        (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), images)
    mean = torch.tensor(mean).view(1, 3, 1, 1)
    return {"gradient": F.adaptive_avg_pool2d((gradient * (images.detach() - mean)).sum(1), grid)}


def draw(results: pd.DataFrame) -> Figure:
    """Draw comprehensiveness and sufficiency by ranking, a colour a model."""
    names = list(results["ranking"].unique())
    figure = Figure(figsize=(6.75, 0.25 * len(names) + 1), layout="constrained")
    for axes, score, better in zip(
        figure.subplots(1, 2, sharey=True), SCORES, ("high", "low"), strict=False
    ):
        for index, (model, rows) in enumerate(results.groupby("model", sort=False)):
            axes.errorbar(
                rows[score],
                [names.index(name) - 0.1 * index for name in rows["ranking"]],
                fmt="o",
                xerr=2 * rows[f"{score}_se"],
                markersize=4,
                label=model,
            )
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xlabel(f"{score} ({better} is faithful), ± two standard errors", fontsize=7)
    axes.legend(fontsize=7)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        default="ea_conv_transformer_cifar",
        help="shipped weights or run folders, separated by commas",
    )
    add(
        "--layers",
        default="all",
        metavar="1,2|all",
        help="attention layers whose maps rank (default: all)",
    )
    add(
        "--rankings",
        default="layers,rollout,random,centre,untrained-rollout",
        help=f"of {', '.join(RANKINGS)}",
    )
    add("--steps", type=int, default=10, help="equal steps of the curves (default: 10)")
    add("--dataset", default="digits", help="digits, cifar10, cifar100, folder (default: digits)")
    add("--data-dir", default="", help="folder of the data set")
    add("--img-size", type=int, help="side of the images in pixels (default: the model's)")
    add("--limit", type=int, metavar="N", help="N test images, drawn by --seed (default: all)")
    add("--batch-size", type=int, default=64)
    add("--amp", default="none", choices=("none", "bfloat16"))
    add(
        "--seed",
        type=int,
        default=0,
        help="of the drawn images, the ties and the untrained network (default: 0)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("faithfulness"),
        help="folder (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    wanted = args.rankings.split(",")
    if not set(wanted) <= set(RANKINGS):
        raise UsageError(f"--rankings must be some of {', '.join(RANKINGS)}, got {args.rankings}")
    args.output.mkdir(parents=True, exist_ok=True)
    results, curves = [], []
    for target in args.model.split(","):
        size = (args.img_size, args.img_size) if args.img_size else None
        model = load_model(target, img_size=size)

        def predict(images: Tensor, model=model) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.amp == "bfloat16"):
                return model.model(model.normalize(images))

        data = load_dataset(args.dataset, args.data_dir, model.img_size[0], False, 2)
        images = data.test.images
        if args.limit:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed))
            images = images[order[: args.limit].sort().values]
        with torch.no_grad(), ea_vision.record_attention(model.model) as maps:
            model.model(torch.zeros(1, 3, *model.img_size))
        layers = (
            list(maps)
            if args.layers == "all"
            else [int(number) for number in args.layers.split(",")]
        )
        grid = max((maps[n].feat_size for n in layers), key=math.prod)
        sources: list[Source] = [attention_source(model, layers, wanted)]
        if untrained := [
            name.removeprefix("untrained-") for name in wanted if name.startswith("untrained-")
        ]:
            network = untrained_network(target, model, data.train.images, args.seed)
            sources.append(attention_source(network, layers, untrained, ", untrained"))
        controls = {
            "gradient": partial(gradient_source, predict, model.config["mean"], grid),
            "centre": partial(centre_source, grid),
            "random": random_source,
        }
        sources += [source for name, source in controls.items() if name in wanted]
        for of in measure(
            predict,
            images,
            sources,
            grid,
            mean=model.config["mean"],
            steps=args.steps,
            batch_size=args.batch_size,
            seed=args.seed,
        ):
            results.append({"model": model.label, **of.row()})
            curves.append(
                pd.DataFrame(
                    {
                        "model": model.label,
                        "ranking": of.ranking,
                        "share": of.shares(),
                        **{score: of.curve(score).mean(0) for score in SCORES[2:]},
                    }
                )
            )
        table = pd.DataFrame(results).round(
            6
        )  # written after each model: a command that is stopped leaves those
        table.to_csv(args.output / "results.csv", index=False)
        pd.concat(curves).round(6).to_csv(args.output / "curves.csv", index=False)
        draw(table).savefig(args.output / "results.png", dpi=200)
    print(table.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

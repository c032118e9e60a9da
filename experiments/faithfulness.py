"""Faithfulness of attention: how the prediction changes when ranked patches are removed.

    python -m experiments.faithfulness --model runs/aa,runs/ea --dataset cifar10 --data-dir DIR -o faithfulness
    python -m experiments.faithfulness --limit 50                            # on digits, a minute

An image is cut into a grid of N patches. x is the whole image, and p(.) the probability of the class that the network
predicts for x. A ranking is an order of the patches, for example by attention. A share r of the patches means
max(1, round(r N)) patches; a removed patch shows the training images' mean colour.

    comprehensiveness   p(x) - p(x without the first r), mean over the shares 1, 5, 10, 20, 50%: high is faithful
    sufficiency         p(x) - p(the first r alone), mean over the same shares: low is faithful
    deletion            area under p as patches are removed in order, over the share removed: low is faithful
    insertion           area under p as patches are put into an image of that colour: high is faithful

Patches of equal rank are in a random order, drawn once per image by a seed, so a uniform map is a random ranking.
The command writes results.csv (means over images and their standard errors), curves.csv and results.png.

* Comprehensiveness, sufficiency: `ERASER` (DeYoung et al. 2020) - https://arxiv.org/abs/1911.03429; EA paper, table 8
* Rollout of a class: `ea_vision.recorder.quantities.class_rollout`; Grad-CAM on the features before the classifier
* Deletion, insertion: `RISE` (Petsiuk et al. 2018) - https://arxiv.org/abs/1806.07421

Shape letters: M images, B a batch of them, h x w the grid, N = h*w its patches (row-major), S counts of patches.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from ea_vision.recorder.class_evidence import add_class_evidence
from ea_vision.recorder.probe import untrained_network
from ea_vision.recorder.quantities import attention_rollout, class_rollout
from ea_vision.recorder.recording import prefix_names
from ea_vision.zoo.loaded import LoadedModel, load_model

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # EA paper, table 8, and ERASER
SCORES = ("comprehensiveness", "sufficiency", "deletion", "insertion")
RANKINGS = (
    "layers",
    "rollout",
    "random",
    "centre",
    "gradient",
    "class-rollout",
    "grad-cam",
    "untrained-layers",
    "untrained-rollout",
)

Predict = Callable[[Tensor], Tensor]  # (B, 3, H, W) in 0..1 -> logits (B, classes)
# images, classes (B,) -> scores (B, any h, any w) by name
Source = Callable[[Tensor, Tensor], Mapping[str, Tensor]]


@dataclass
class Curves:
    """Probabilities of the class that the network predicts for the whole image, as ranked patches are removed or kept.

    counts: ascending numbers of patches. patches: N. bins: the number of patches for each of SHARES, maybe repeated.
    whole, empty: (M,), for the whole image, and with all patches removed.
    removed, kept: (M, S), without the first `counts` patches, and with only these.
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
        """Return each score of SCORES per image, (M,)."""
        bins = [self.counts.index(count) for count in self.bins]
        shares = torch.tensor(self.shares())
        return {
            "comprehensiveness": self.whole - self.removed[:, bins].mean(1),
            "sufficiency": self.whole - self.kept[:, bins].mean(1),
            "deletion": torch.trapezoid(self.curve("deletion"), shares, dim=1),
            "insertion": torch.trapezoid(self.curve("insertion"), shares, dim=1),
        }

    def shares(self) -> list[float]:
        """Return the shares of the patches at the points of `curve`, from none to all of them."""
        return [0.0, *[count / self.patches for count in self.counts], 1.0]

    def curve(self, score: str) -> Tensor:
        """Return the probabilities of "deletion" or "insertion" at each of `shares`, (M, S + 2)."""
        if score == "deletion":
            return torch.cat([self.whole[:, None], self.removed, self.empty[:, None]], dim=1)
        return torch.cat([self.empty[:, None], self.kept, self.whole[:, None]], dim=1)

    def row(self) -> dict[str, float]:
        """Return the mean of each score over images and its standard error."""
        row = {"ranking": self.ranking}
        for name, score in self.scores().items():
            row[name] = score.double().mean().item()
            row[f"{name}_se"] = score.double().std().item() / len(score) ** 0.5
        return {**row, "images": len(self.whole)}


def order_of(scores: Tensor, grid: tuple[int, int], ties: Tensor) -> Tensor:
    """Return the patches in order of descending score, (B, N).

    Args:
        scores: (B, h', w') of any size, resized bilinearly to the grid.
        ties: (B, N), a random order of the patches, used among patches with equal scores.
    """
    if scores.shape[1:] != grid:
        scores = F.interpolate(scores[:, None].float(), grid, mode="bilinear", antialias=True)[:, 0]
    in_random_order = scores.flatten(1).cpu().gather(1, ties)
    falling = in_random_order.argsort(dim=1, descending=True, stable=True)
    return ties.gather(1, falling)


def patch_of_pixels(size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Return each pixel's patch number, (H, W)."""
    rows = torch.arange(size[0]) * grid[0] // size[0]
    columns = torch.arange(size[1]) * grid[1] // size[1]
    return rows[:, None] * grid[1] + columns


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
    """Remove and keep patches in the order of rankings; return the network's probabilities, one Curves per ranking.

    Args:
        images: uint8 (M, 3, H, W).
        sources: sources of rankings.
        grid: (h, w) of the patches, at most one per pixel.
        mean: the colour of removed patches.
        steps: number of equal steps of the deletion and insertion curves; SHARES are added as further points.
        seed: seed of the order of patches of equal rank.
    """
    N = grid[0] * grid[1]
    patch_of = patch_of_pixels(images.shape[-2:], grid)
    bins = [max(1, round(share * N)) for share in SHARES]
    equal_steps = [round(step * N / steps) for step in range(1, steps)]
    counts = sorted({*bins, *equal_steps} - {0})
    generator = torch.Generator().manual_seed(seed)
    ties = torch.stack([torch.randperm(N, generator=generator) for _ in range(len(images))])
    colour = torch.tensor(mean).view(1, 3, 1, 1)
    wholes: list[Tensor] = []
    empties: list[Tensor] = []
    removed: dict[str, list[Tensor]] = {}
    kept: dict[str, list[Tensor]] = {}
    for index in tqdm(torch.arange(len(images)).split(batch_size), unit="batch", disable=None):
        batch = images[index] / 255
        empty = colour.to(batch).expand_as(batch)
        on_whole, classes = predict(batch).float().softmax(-1).max(-1)

        def probability(shown: Tensor, classes=classes) -> Tensor:
            probabilities = predict(shown).float().softmax(-1)
            return probabilities.gather(1, classes[:, None])[:, 0].cpu()

        wholes.append(on_whole.cpu())
        empties.append(probability(empty))
        rankings: dict[str, Tensor] = {}
        for source in sources:
            rankings.update(source(batch, classes))
        for ranking, scores in rankings.items():
            rank_of_patch = order_of(scores, grid, ties[index]).argsort(1)
            rank = rank_of_patch[:, None, patch_of]  # (B, 1, H, W)
            without = [probability(torch.where(rank < n, empty, batch)) for n in counts]
            alone = [probability(torch.where(rank < n, batch, empty)) for n in counts]
            removed.setdefault(ranking, []).append(torch.stack(without, 1))
            kept.setdefault(ranking, []).append(torch.stack(alone, 1))
    curves = []
    for ranking in removed:
        curves.append(
            Curves(
                ranking=ranking,
                counts=tuple(counts),
                patches=N,
                bins=tuple(bins),
                whole=torch.cat(wholes),
                empty=torch.cat(empties),
                removed=torch.cat(removed[ranking]),
                kept=torch.cat(kept[ranking]),
            )
        )
    return curves


def attention_source(
    model: LoadedModel,
    layers: Sequence[int],
    kinds: Sequence[str] = ("layers", "rollout"),
    note: str = "",
) -> Source:
    """Return a source of rankings by attention maps.

    A map ranks the patches by the class token's attention if the classifier reads the class token, else by the mean
    attention of all patches.

    Args:
        model: the network with the maps; the probabilities may come from another network.
        layers: numbers of the layers that rank patches; a rollout goes through all layers of the model.
        kinds: "layers" (each layer's mean over heads, named "layer 3"), "rollout" and "class-rollout".
        note: suffix of the rankings' names.
    """
    cls = "cls" in prefix_names(model.model) and getattr(model.model, "global_pool", "") == "token"

    def looked_at(maps: Tensor, queries, keys) -> Tensor:
        """Return the attention to each patch: (B, T', T) -> (B, h, w)."""
        if cls and "cls" in queries.prefix_names:
            seen = maps[:, queries.token("cls")]
        else:  # also for layers before the class token is added (CaiT)
            queries.check_pixels_ask()
            seen = maps[:, queries.num_prefix_tokens :].mean(1)
        pooled = maps.shape[-1] == keys.num_prefix_tokens + math.prod(keys.key_size)
        size = keys.key_size if pooled else keys.feat_size
        patches = seen[..., keys.num_prefix_tokens :]
        return patches.unflatten(-1, size).float()

    def source(images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
        whole = {"rollout", "class-rollout"} & set(kinds)
        recorded = None if whole else list(layers)
        with torch.no_grad(), ea_vision.record_attention(model.model, recorded) as maps:
            model.model(model.preparation.normalize(images))
        scores = {}
        if "layers" in kinds:
            for number in layers:
                layer = maps[number]
                scores[f"layer {number}{note}"] = looked_at(layer.attn.mean(1), layer, layer)
        if "rollout" in kinds:
            first, *_, last = maps.values()
            scores[f"rollout{note}"] = looked_at(attention_rollout(maps), last, first)
        if "class-rollout" in kinds:
            first, *_, last = maps.values()
            batch = model.preparation.normalize(images)
            add_class_evidence(model.model, batch, maps, classes.tolist())
            scores[f"class rollout{note}"] = looked_at(class_rollout(maps), last, first)
        return scores

    return source


def grad_cam_source(model: LoadedModel, images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
    """Rank by Grad-CAM on the features before the classifier (B, C, h, w): the positive part of their sum, weighted by
    the mean gradient of the class's logit (Selvaraju et al. 2017)."""
    with torch.enable_grad():
        features = model.model.forward_features(model.preparation.normalize(images))
        features = features.detach().requires_grad_()
        logits = model.model.forward_head(features).gather(1, classes[:, None])
        (gradient,) = torch.autograd.grad(logits.sum(), features)
    weights = gradient.mean((2, 3), keepdim=True)
    return {"grad-cam": (weights * features.detach()).sum(1).relu()}


def random_source(images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
    """Rank all patches equally, so that their order is random."""
    return {"random": torch.zeros(len(images), 1, 1)}


def centre_source(grid: tuple[int, int], images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
    """Rank the patches nearer to the middle of the image first: a ranking that a map should beat."""
    rows = (torch.arange(grid[0]) + 0.5) / grid[0] - 0.5
    columns = (torch.arange(grid[1]) + 0.5) / grid[1] - 0.5
    distance = rows[:, None] ** 2 + columns**2
    return {"centre": -distance.expand(len(images), -1, -1)}


def gradient_source(
    predict: Predict, mean: Sequence[float], grid: tuple[int, int], images: Tensor, classes: Tensor
) -> Mapping[str, Tensor]:
    """Rank by the decrease of the class's log-probability without a patch, to first order: gradient times (image - mean
    colour), averaged over the patch. This ranking uses the network, not only its maps, and serves as a comparison."""
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        log_probabilities = predict(images).float().log_softmax(-1)
        class_log_probability = log_probabilities.gather(1, classes[:, None])
        (gradient,) = torch.autograd.grad(class_log_probability.sum(), images)
    colour = torch.tensor(mean).view(1, 3, 1, 1)
    losses = (gradient * (images.detach() - colour)).sum(1)
    return {"gradient": F.adaptive_avg_pool2d(losses, grid)}


def draw(results: pd.DataFrame) -> Figure:
    """Draw comprehensiveness and sufficiency by ranking, one colour per model."""
    names = list(results["ranking"].unique())
    figure = Figure(figsize=(6.75, 0.25 * len(names) + 1), layout="constrained")
    columns = figure.subplots(1, 2, sharey=True)
    for axes, score, better in zip(columns, SCORES[:2], ("high", "low"), strict=True):
        for index, (model, rows) in enumerate(results.groupby("model", sort=False)):
            places = [names.index(name) - 0.1 * index for name in rows["ranking"]]
            errors = 2 * rows[f"{score}_se"]
            axes.errorbar(rows[score], places, fmt="o", xerr=errors, markersize=4, label=model)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xlabel(f"{score} ({better} is faithful), ± two standard errors", fontsize=7)
    axes.legend(fontsize=7)
    return figure


def make_parser() -> argparse.ArgumentParser:
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
        help="attention layers whose maps rank patches (default: all)",
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
        help="seed of the drawn images, the ties and the untrained network (default: 0)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("faithfulness"),
        help="folder (default: %(default)s)",
    )
    return parser


def drawn_images(images: Tensor, limit: int | None, seed: int) -> Tensor:
    """Return `limit` random images (None: all), drawn by the seed, in their original order."""
    if not limit:
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images[order[:limit].sort().values]


def curves_of(target: str, wanted: Sequence[str], args: argparse.Namespace) -> tuple[str, list]:
    """Return a model's label and its curves, one for each ranking."""
    size = (args.img_size, args.img_size) if args.img_size else None
    model = load_model(target, img_size=size)
    mean = model.preparation.mean

    def predict(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.amp == "bfloat16"):
            return model.model(model.preparation.normalize(images))

    data = load_dataset(args.dataset, args.data_dir, model.preparation)
    with torch.no_grad(), ea_vision.record_attention(model.model) as maps:
        model.model(torch.zeros(1, 3, *model.img_size))
    layers = list(maps)
    if args.layers != "all":
        layers = [int(number) for number in args.layers.split(",")]
    grid = max((maps[number].feat_size for number in layers), key=math.prod)
    sources: list[Source] = [attention_source(model, layers, wanted)]
    untrained = [
        name.removeprefix("untrained-") for name in wanted if name.startswith("untrained-")
    ]
    if untrained:
        network = untrained_network(target, model, data.train.images, args.seed)
        sources.append(attention_source(network, layers, untrained, ", untrained"))
    controls = {
        "gradient": partial(gradient_source, predict, mean, grid),
        "centre": partial(centre_source, grid),
        "grad-cam": partial(grad_cam_source, model),
        "random": random_source,
    }
    sources += [source for name, source in controls.items() if name in wanted]
    curves = measure(
        predict,
        drawn_images(data.test.images, args.limit, args.seed),
        sources,
        grid,
        mean=mean,
        steps=args.steps,
        batch_size=args.batch_size,
        seed=args.seed,
    )
    return model.label, curves


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    ranking_names = args.rankings.split(",")
    if not set(ranking_names) <= set(RANKINGS):
        raise UsageError(f"--rankings must be some of {', '.join(RANKINGS)}, got {args.rankings}")
    args.output.mkdir(parents=True, exist_ok=True)
    results = []
    points = []
    for target in args.model.split(","):
        label, curves = curves_of(target, ranking_names, args)
        for of_ranking in curves:
            results.append({"model": label, **of_ranking.row()})
            columns = {score: of_ranking.curve(score).mean(0) for score in SCORES[2:]}
            about = {"model": label, "ranking": of_ranking.ranking, "share": of_ranking.shares()}
            points.append(pd.DataFrame({**about, **columns}))
        # written after each model, so that a stopped command leaves the tables of finished models
        table = pd.DataFrame(results).round(6)
        table.to_csv(args.output / "results.csv", index=False)
        pd.concat(points).round(6).to_csv(args.output / "curves.csv", index=False)
        draw(table).savefig(args.output / "results.png", dpi=200)
    print(table.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

"""Whether attention tells what a network's class hangs on: patches are removed in the order of a ranking.

`ea_vision.recorder.faithfulness` has the definitions of comprehensiveness, sufficiency, deletion and insertion."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import PAGE, check_width, inches
from ea_vision.base.files import create, write_npz
from ea_vision.base.print import legend_below, new_figure, points, print_style, small_ticks, wrapped
from ea_vision.base.tables import shown
from ea_vision.data.small_images import DataSet
from ea_vision.engine.evaluate import autocast
from ea_vision.recorder.faithfulness import (
    FILLINGS,
    SCORES,
    SHARES,
    Curves,
    Source,
    measure_rankings,
    row_of,
    rows_csv,
    rows_table,
)
from ea_vision.recorder.loading import WEIGHTS_HELP, LoadedModel, parse_layers, parse_size, positive
from ea_vision.recorder.patch_rankings import (
    CAMS,
    KINDS,
    ROWS,
    AttentionSource,
    CamSource,
    CentreSource,
    GradientSource,
    random_source,
)
from ea_vision.recorder.probe import add_data_options, load_classifiers, load_data, sample, write_results
from ea_vision.recorder.probe_maps import untrained_network
from ea_vision.recorder.recording import record_attention
from ea_vision.recorder.relevance import RelevanceSource
from ea_vision.visualize.image_maps import distinct
from ea_vision.visualize.map_style import QUERY_COLORS

CONTROLS = ("random", "centre", "gradient", "untrained-layers", "untrained-rollout")
RANKINGS = (*KINDS, *CONTROLS, *CAMS, "attnlrp")
EXAMPLES = """\
examples:
  ea-vision faithfulness --model runs/aa,runs/ea --dataset cifar10 --data-dir DIR -o faithfulness
  ea-vision faithfulness --rankings layers,rollout,random --limit 50         # a minute or two on a CPU, on digits
  ea-vision faithfulness --model RUN --rankings rollout,random,GradCAM,attnlrp         # with grad-cam installed
"""
MARKERS = "osD^vP*"
GREYS = {"random": ("0.35", ":"), "centre": ("0.35", "--"), "gradient": ("#CC79A7", "-.")}


def faithfulness_figure(measured: Mapping[str, Sequence[Curves]], *, width: float | None = None) -> Figure:
    """Comprehensiveness and sufficiency by ranking, a colour a model; under them the curves of each model.

    Args:
        measured: curves by model.
        width: inches.
    """
    with print_style():
        return _draw(measured, check_width(width) or PAGE)


def _draw(measured: Mapping[str, Sequence[Curves]], width: float) -> Figure:
    names = list(dict.fromkeys(curves.ranking for of_model in measured.values() for curves in of_model))
    some = next(iter(measured.values()))[0]
    columns = min(len(measured), max(1, int(width // 2)))
    lines = -(-len(measured) // columns)
    titles = [wrapped(label, 72 * width / columns - 40, points("medium")) for label in measured]
    of_titles = 0.14 * (1 + max(title.count("\n") for title in titles))
    heights = max(0.16, 0.07 * len(measured)) * len(names) + 0.9, (3.3 + of_titles) * lines + 0.5
    figure = new_figure(width, sum(heights), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    scores = above.subplots(1, 2, sharey=True)
    for axes, score, better in zip(scores, SCORES, ("high", "low"), strict=False):
        for index, (label, of_model) in enumerate(measured.items()):
            rows = {curves.ranking: row_of(label, curves) for curves in of_model}
            places = [names.index(name) + (index - (len(measured) - 1) / 2) * 0.7 / len(measured) for name in rows]
            color = QUERY_COLORS[index % len(QUERY_COLORS)]
            axes.errorbar([row[score] for row in rows.values()], places, fmt=MARKERS[index % len(MARKERS)],
                          xerr=[2 * row[f"{score}_se"] for row in rows.values()], color=color, markersize=4,
                          elinewidth=1, label=label)
            if "random" in rows:
                axes.axvline(rows["random"][score], color=color, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel(f"{score}\n({better} is faithful)")
        axes.grid(axis="y", alpha=0.2)
        small_ticks(axes)
        axes.spines[["top", "right"]].set_visible(False)
    scores[0].invert_yaxis()
    legend_below(above, *scores[0].get_legend_handles_labels())
    panels = below.subplots(2 * lines, columns, squeeze=False, sharex=True, sharey=True)
    for index in range(len(measured), lines * columns):
        for axes in panels[2 * (index // columns):, index % columns][:2]:
            axes.set_visible(False)
    colors = _line_styles(names)
    for index, of_model in enumerate(measured.values()):
        pair = panels[2 * (index // columns):, index % columns][:2]
        for axes, curve in zip(pair, ("deletion", "insertion"), strict=True):
            for curves in of_model:
                color, style = colors[curves.ranking]
                axes.plot([100 * share for share in curves.shares()], curves.curve(curve), style,
                          color=color, linewidth=1.2, label=curves.ranking)
            small_ticks(axes)
            axes.grid(alpha=0.2)
        pair[0].set_title(titles[index], parse_math=False)
        pair[1].tick_params(labelbottom=True)
        pair[1].set_xlabel("share of the patches (%)")
    for first in range(0, 2 * lines, 2):
        panels[first, 0].set_ylabel("deletion:\nprobability without\nthe first patches")
        panels[first + 1, 0].set_ylabel("insertion:\nprobability of the\nfirst patches alone")
    panels[0, 0].set_ylim(0, 1)
    drawn = {line.get_label(): line for axes in panels.flat for line in axes.get_lines()}
    legend_below(below, list(drawn.values()), list(drawn))
    images = len(some.whole)
    figure.suptitle(wrapped(f"{images} image{'s' * (images > 1)}; bars: two standard errors; dotted: random",
                            72 * width - 10, points("medium")))
    return figure


def _line_styles(names: Sequence[str]) -> dict[str, tuple]:
    """Colour and line by ranking: layers from dark to light as they come, controls grey, all else of its own."""
    layers = [name for name in names if name.startswith("layer") and "untrained" not in name]
    styles = {name: (colormaps["viridis"](index / max(1, len(layers))), "-") for index, name in enumerate(layers)}
    others = [name for name in names if name not in layers and name not in GREYS]
    styles |= {name: (QUERY_COLORS[index % len(QUERY_COLORS)], "--" if "untrained" in name else "-")
               for index, name in enumerate(others)}
    return styles | GREYS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="ea_conv_transformer_cifar", metavar="NAME|RUN[,..]",
        help=f"{WEIGHTS_HELP}; several separated by commas (default: %(default)s)")
    add("--layers", default="all", metavar="1,2|3-5|all",
        help="attention layers, counted from 1, whose maps rank patches (default: %(default)s)")
    add("--rankings", default="layers,rollout,random,centre,untrained-rollout", metavar="A,B",
        help="what to rank patches by, some of: layers, the mean of each layer's heads; heads; rollout, through all "
             "layers; random; centre, the nearer to the middle, the earlier; gradient, of the class's log-probability "
             "times what a patch differs from the mean colour; untrained-layers and untrained-rollout, of the network "
             "as it begins training; attnlrp, relevance propagated back from the class; "
             f"with pytorch-grad-cam installed {', '.join(CAMS)} (default: %(default)s)")
    add("--rows", default="auto", choices=ROWS,
        help="whose rows of a map: mean, of all patches; cls, the class token's; auto, that one's where the classifier "
             "reads it, else of all patches (default: %(default)s)")
    add("--cam-layer", metavar="MODULE", help="whose output class activation maps weight (default: the last stage)")
    add("--patches", metavar="N|H,W", help="grid of patches (default: the largest map's)")
    add("--filling", default="mean", choices=FILLINGS,
        help="what a removed patch shows: the training images' mean colour, or the image blurred "
             "(default: %(default)s)")
    add("--width", type=inches, metavar="3.3|6.75|N", help="of results.png in inches (default: 6.75)")
    add("--steps", type=positive, default=10, metavar="N",
        help="equal steps of the deletion and insertion curves, beside the shares of 1, 5, 10, 20 and 50%% of the "
             "patches (default: %(default)s)")
    add_data_options(parser, "N test images, drawn by --seed (default: all)")
    add("--batch-size", type=positive, default=64, help="images (default: %(default)s)")
    add("--amp", default="none", choices=("none", "bfloat16", "float16"), help="precision (default: %(default)s)")
    add("--channels-last", action="store_true", help="the layout that convolutions like, with bfloat16 above all")
    add("--seed", type=int, default=0,
        help="of the drawn images, the order of patches that a ranking leaves alike, and the untrained network "
             "(default: 0)")
    add("-o", "--output", default="faithfulness", metavar="DIR",
        help="results.csv, results.json and results.png (default: %(default)s)")
    add("--npz", action="store_true",
        help="write the scores of every image too, as results.npz for np.load: MODEL/RANKING/SCORE, (images,) each")
    return parser


def parse_rankings(text: str) -> list[str]:
    """Names of RANKINGS, separated by commas.

    Raises:
        UsageError: another name.
    """
    names = text.split(",")
    wrong = [name for name in names if name not in RANKINGS]
    if wrong:
        raise UsageError(f"--rankings must be some of {', '.join(RANKINGS)}, got {', '.join(map(repr, wrong))}")
    return list(dict.fromkeys(names))


def patch_grid(text: str | None, model: LoadedModel, layers: Sequence[int], device: torch.device) -> tuple[int, int]:
    """The grid asked for, or that of the largest map among the layers."""
    asked_for = parse_size(text, "--patches must be N or H,W patches")
    if asked_for is not None:
        return asked_for
    with torch.no_grad(), record_attention(model.model, layers) as maps:
        model.model(torch.zeros(1, 3, *model.img_size, device=device))
    return max((layer.feat_size for layer in maps.values()), key=math.prod)


class Subject:
    """A network, and the sources of the rankings that it is measured with."""

    def __init__(self, target: str, model: LoadedModel, options: argparse.Namespace, device: torch.device) -> None:
        self.target, self.model, self.options, self.device = target, model, options, device
        self.layers = [layer.number for layer in parse_layers(options.layers, model)]
        self.rankings = parse_rankings(options.rankings)
        self.grid = patch_grid(options.patches, model, self.layers, device)
        if any(patches > pixels for patches, pixels in zip(self.grid, model.img_size, strict=True)):
            raise UsageError(f"--patches must be at most {model.img_size[0]},{model.img_size[1]}, one a pixel of "
                             f"{model.label}'s input, got {self.grid[0]},{self.grid[1]}")
        cams = [name for name in self.rankings if name in CAMS]
        self.cams = CamSource(model, cams, options.cam_layer) if cams else None
        self.relevance = RelevanceSource(model, self.grid) if "attnlrp" in self.rankings else None

    def predict(self, images: Tensor) -> Tensor:
        batch = self.model.normalize(images)
        if self.options.channels_last:
            batch = batch.contiguous(memory_format=torch.channels_last)
        with autocast(self.options.amp, self.device):
            return self.model.model(batch)

    def sources(self, data: DataSet) -> list[Source]:
        """In the order of the rankings, those of one source together."""
        made: list[Source] = []
        kinds = [name for name in self.rankings if name in KINDS]
        untrained = [name.removeprefix("untrained-") for name in self.rankings if name.startswith("untrained-")]
        if kinds:
            made.append(AttentionSource(self.model, self.layers, kinds, self.options.rows))
        if "gradient" in self.rankings:
            made.append(GradientSource(self.predict, self.model.config["mean"], self.grid))
        if self.cams is not None:
            made.append(self.cams)
        if self.relevance is not None:
            made.append(self.relevance)
        if untrained:
            network = untrained_network(self.target, self.model, data.train.images, self.options.seed)
            made.append(AttentionSource(network, self.layers, untrained, self.options.rows, note=", untrained"))
        if "centre" in self.rankings:
            made.append(CentreSource(self.grid))
        if "random" in self.rankings:
            made.append(random_source)
        return made


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    targets, models, device = load_classifiers(options)
    subjects = [Subject(target, model, options, device)
                for target, model in zip(targets, distinct(models), strict=True)]
    output = Path(options.output)
    create(output)
    measured: dict[str, list[Curves]] = {}
    about: dict[str, dict] = {}
    for subject in subjects:
        model = subject.model
        if options.channels_last:
            model.model.to(memory_format=torch.channels_last)
        data = load_data(options, model)
        images = sample(data.test, options.limit, options.seed).images
        curves = measure_rankings(subject.predict, images, subject.sources(data), subject.grid,
                                  mean=model.config["mean"], filling=options.filling, steps=options.steps,
                                  batch_size=options.batch_size, seed=options.seed, device=device, name=model.label)
        measured[model.label] = curves
        about[model.label] = {
            "data_fingerprint": data.fingerprint(), "patches": subject.grid, "layers": subject.layers,
            "shares": SHARES, "counts_of_shares": curves[0].bins,
            "probability_whole": curves[0].whole.mean().item(), "probability_empty": curves[0].empty.mean().item(),
            "curve_shares": curves[0].shares(),
            "curves": {c.ranking: {score: c.curve(score) for score in SCORES[2:]} for c in curves}}
        print(shown(rows_table([row_of(model.label, of_ranking) for of_ranking in curves])), flush=True)
        write_so_far(output, about, measured, options, device)
    print("means over images ± standard errors; faithful: high comprehensiveness and insertion, low sufficiency and "
          "deletion")
    print("written:", *(output / f"results.{suffix}" for suffix in ("csv", "json", "png", "npz")[:3 + options.npz]))
    return 0


def write_so_far(output: Path, about: dict[str, dict], measured: dict[str, list[Curves]], options: argparse.Namespace,
                 device: torch.device) -> None:
    """Of the models that are measured so far: a command that is stopped leaves those."""
    rows = [row_of(label, curves) for label, of_model in measured.items() for curves in of_model]
    write_results(output, rows_csv(rows), faithfulness_figure(measured, width=options.width),
                  {"results": rows, "models": about}, options, device)
    if options.npz:
        write_npz(output / "results.npz", {f"{label}/{curves.ranking}/{score}": getattr(curves, score)().numpy()
                                           for label, of_model in measured.items() for curves in of_model
                                           for score in SCORES})

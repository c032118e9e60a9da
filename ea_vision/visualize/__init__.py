"""Figures of attention maps, a call each: a model and an image in, a matplotlib Figure out.

    import timm, ea_vision
    from ea_vision.visualize import plot_heatmap

    model = timm.create_model("ea_conv_transformer_cifar", pretrained=True)
    plot_heatmap(model, "cat.jpg", layers=[1, 3], queries=[(16, 16)], width=3.3).savefig("heads.pdf")

plot_heatmap     what query points attend to, by head, model or image (`ea-vision heatmap`); plot_heads is the same
plot_strip       one query through the layers of a chain, part by part, or through training (`ea-vision strip`)
plot_match       a pixel of one image, and what matches it in another (visualize/match.py)
plot_matrix      whole maps, queries by keys (visualize/matrix.py)
plot_rollout     attention over several layers together (visualize/rollout.py)
plot_statistics  entropy, distance, likeness and share of position alone, by layer and head (`ea-vision statistics`)
plot_chain       the same of a chain in one small panel
plot_frames      the pictures of a film (`ea-vision strip -o FILE.gif`)
plot_jacobian    what moves the logit of a class, beside the attention that every pixel gets
plot_sampling    where a spatial transformer looks, and what it hands on
show_page        the page of `ea-vision explore`, inside a notebook

`ea_vision.visualize.figure_options` says what they take. Where one forward is to serve several figures, `record` makes
the recording, and draw_heatmap, draw_models, draw_images, draw_strip, draw_training, draw_match, draw_matrix,
draw_rollout, draw_statistics, draw_chain and draw_frames draw it. Heads are counted from 0, layers from 1, query points
are (y, x) in pixels of the input.
"""
import warnings

from ea_vision.visualize.explore import show_page
from ea_vision.visualize.heatmap import draw_heatmap, draw_images, draw_models, plot_heatmap
from ea_vision.visualize.image_maps import MEAN, Recording, record
from ea_vision.visualize.jacobian import input_jacobian, plot_jacobian
from ea_vision.visualize.map_style import MapStyle
from ea_vision.visualize.match import draw_match, plot_match
from ea_vision.visualize.matrix import draw_matrix, plot_matrix
from ea_vision.visualize.rollout import draw_rollout, plot_rollout
from ea_vision.visualize.sampling import plot_sampling
from ea_vision.visualize.statistics import draw_chain, draw_statistics, plot_chain, plot_statistics
from ea_vision.visualize.strip import draw_frames, draw_strip, draw_training, plot_frames, plot_strip

__all__ = [
    "MapStyle", "Recording", "draw_chain", "draw_frames", "draw_heatmap", "draw_images", "draw_match", "draw_matrix",
    "draw_models", "draw_rollout", "draw_statistics", "draw_strip", "draw_training", "input_jacobian", "plot_chain",
    "plot_frames", "plot_heads", "plot_heatmap", "plot_jacobian", "plot_match", "plot_matrix", "plot_rollout",
    "plot_sampling", "plot_statistics", "plot_strip", "record", "show_page",
]

plot_heads = plot_heatmap


def _plot_grid(model, images, layer=1, head=MEAN, query=None, **style):
    return plot_heatmap(model, list(images), layer, head, None if query is None else [query], **style)


def _plot_training(run, image, layers=None, head=MEAN, query=None, **style):
    return plot_strip(run, image, layers, head, query, through="checkpoints", **style)


_RENAMED = {  # names of release 0.3, which go with 0.5
    "Look": ("MapStyle", MapStyle), "heads_by_queries": ("draw_heatmap", draw_heatmap),
    "models_side_by_side": ("draw_models", draw_models), "images_grid": (
        "draw_images", lambda recordings, layer, head, *more: draw_images(recordings, [layer], [head], *more)),
    "evolution_strip": ("draw_strip", draw_strip), "training_strip": ("draw_training", draw_training),
    "attention_matrices": ("draw_matrix", draw_matrix), "rollout_figure": ("draw_rollout", draw_rollout),
    "statistics_figure": ("draw_statistics", draw_statistics), "animation_frames": ("draw_frames", draw_frames),
    "match_figure": ("draw_match", draw_match), "plot_models": ("plot_heatmap", plot_heatmap),
    "plot_grid": ("plot_heatmap", _plot_grid), "plot_training": ("plot_strip(through='checkpoints')", _plot_training),
}


def __getattr__(name: str):
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new, what = _RENAMED[name]
    warnings.warn(f"ea_vision.visualize.{name} is now {new}", DeprecationWarning, stacklevel=2)
    return what

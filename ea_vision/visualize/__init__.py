"""Figures of attention maps, a call each: a model and an image in, a matplotlib Figure out.

    import timm, ea_vision
    from ea_vision.visualize import plot_heads

    model = timm.create_model("ea_conv_transformer_cifar", pretrained=True)
    plot_heads(model, image, layers=[1, 3], queries=[(16, 16)]).savefig("heads.png")         # image: PIL or tensor

plot_heads       what query points attend to, by head (`ea-vision heatmap`)
plot_models      the same layers of several models side by side (`ea-vision heatmap --model A,B`)
plot_grid        one head on many images (`ea-vision grid`)
plot_match       a pixel of one image, and what matches it in another (`ea-vision match`)
plot_training    attention through the checkpoints of a run (`ea-vision strip --through checkpoints`)
plot_strip       one query through the layers of a chain, part by part (`ea-vision strip`)
plot_matrix      whole maps, queries by keys (`ea-vision matrix`)
plot_rollout     attention over several layers together (`ea-vision rollout`)
plot_statistics  entropy, distance and likeness by layer and head (`ea-vision statistics`)
plot_frames      the frames of an animation (`ea-vision animation`)
plot_jacobian    what moves the logit of a class, beside the attention that every pixel gets
plot_sampling    where a spatial transformer looks, and what it hands on

`plots` says what they take. Where one forward is to serve several figures, `record` makes the recording, and
heads_by_queries, models_side_by_side, evolution_strip, attention_matrices, rollout_figure, statistics_figure and
animation_frames draw it. Heads are counted from 0, layers from 1, query points are (y, x) in pixels of the input.
"""
import warnings

from ea_vision.visualize.films import animation_frames
from ea_vision.visualize.heatmap import heads_by_queries
from ea_vision.visualize.image_grid import images_grid
from ea_vision.visualize.image_maps import Recording, record
from ea_vision.visualize.jacobian import input_jacobian, plot_jacobian
from ea_vision.visualize.map_style import MapStyle
from ea_vision.visualize.match import match_figure
from ea_vision.visualize.matrix import attention_matrices
from ea_vision.visualize.plots import (
    plot_frames,
    plot_grid,
    plot_heads,
    plot_match,
    plot_matrix,
    plot_models,
    plot_rollout,
    plot_statistics,
    plot_strip,
    plot_training,
)
from ea_vision.visualize.rollout import rollout_figure
from ea_vision.visualize.sampling import plot_sampling
from ea_vision.visualize.side_by_side import models_side_by_side
from ea_vision.visualize.statistics import statistics_figure
from ea_vision.visualize.strip import evolution_strip, training_strip

__all__ = [
    "MapStyle",
    "Recording",
    "animation_frames",
    "attention_matrices",
    "evolution_strip",
    "images_grid",
    "input_jacobian",
    "heads_by_queries",
    "match_figure",
    "models_side_by_side",
    "plot_frames",
    "plot_grid",
    "plot_heads",
    "plot_jacobian",
    "plot_match",
    "plot_matrix",
    "plot_models",
    "plot_rollout",
    "plot_sampling",
    "plot_statistics",
    "plot_strip",
    "plot_training",
    "record",
    "rollout_figure",
    "statistics_figure",
    "training_strip",
]

_RENAMED = {"Look": "MapStyle"}  # names of release 0.3, which go with 0.5


def __getattr__(name: str):
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"ea_vision.visualize.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]

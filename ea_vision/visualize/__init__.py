"""Figures of attention maps. A function each, which takes recordings and returns a matplotlib Figure:

    from ea_vision.analysis.loading import load_model, parse_layers
    from ea_vision.visualize import heads_by_queries, record

    model = load_model("ea_conv_transformer_cifar")
    recording = record(model, image, parse_layers("1-3", model))               # image: PIL
    heads_by_queries(recording, [1, 2, 3], [0, "mean"], [(16, 16)]).savefig("heads.png")

Heads are counted from 0, layers from 1, query points are (y, x) in pixels of the input as the network sees it.

record               run a network on an image, keep its maps: what the figures are drawn from
heads_by_queries     what query points attend to, by head (`ea-vision heatmap`)
models_side_by_side  the same layers of several models (`ea-vision heatmap --model A,B`)
evolution_strip      one query through the layers of a chain, part by part (`ea-vision strip`)
attention_matrices   whole maps, queries by keys (`ea-vision matrix`)
rollout_figure       attention over several layers together (`ea-vision rollout`)
statistics_figure    entropy, distance and likeness by layer and head (`ea-vision statistics`)
animation_frame, draw_frames    pictures of an animation (`ea-vision animation`)
"""
from ea_vision.visualize.animation import animation_frame, draw_frames
from ea_vision.visualize.heatmap import heads_by_queries
from ea_vision.visualize.layer_statistics import statistics_figure
from ea_vision.visualize.matrix import attention_matrices
from ea_vision.visualize.recordings import Recording, record
from ea_vision.visualize.rollout import rollout_figure
from ea_vision.visualize.side_by_side import models_side_by_side
from ea_vision.visualize.strip import evolution_strip

__all__ = [
    "Recording",
    "animation_frame",
    "attention_matrices",
    "draw_frames",
    "evolution_strip",
    "heads_by_queries",
    "models_side_by_side",
    "record",
    "rollout_figure",
    "statistics_figure",
]

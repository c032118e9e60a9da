"""Figures of attention maps. Each is one call that takes a model and an image and returns a matplotlib Figure.

    import timm, ea_vision
    from ea_vision.visualize import plot_heatmap

    model = timm.create_model("ea_conv_transformer_cifar", pretrained=True)
    plot_heatmap(model, "cat.jpg", layers=[1, 3], queries=[(16, 16)], width=3.3).savefig("heads.pdf")

plot_heatmap     what query points attend to, by head, model or image (`ea-vision heatmap`); plot_heads is the same
plot_strip       one query through the layers of a chain, part by part, what the previous maps changed, or attention
                 through training (`ea-vision strip`)
plot_matrix      whole maps, queries by keys (`ea-vision matrix`)
plot_rollout     attention over several layers together (`ea-vision rollout`)
plot_statistics  entropy, distance, correlation with the previous layer's map and share of position alone, by layer and
                 head (`ea-vision statistics`)
plot_jacobian    how much each pixel moves the logit of a class, beside the attention that each pixel receives
show_page        the page of `ea-vision explore`, inside a notebook

`ea_vision.visualize.figure_request` explains the arguments. To draw several figures from one forward, call `record`
once, with a network of `ea_vision.zoo.loaded`, and pass the recording to the modules' draw_* functions. Heads are
counted from 0, layers from 1, query points are (y, x) in pixels of the input.
"""

from ea_vision.base.lazy import import_later

__getattr__, __dir__ = import_later(
    __name__,
    {
        "MapStyle": "ea_vision.visualize.map_style:MapStyle",
        "Recording": "ea_vision.visualize.tiles:Recording",
        "input_jacobian": "ea_vision.visualize.implicit:input_jacobian",
        "plot_heads": "ea_vision.visualize.heatmap:plot_heatmap",
        "plot_heatmap": "ea_vision.visualize.heatmap:plot_heatmap",
        "plot_jacobian": "ea_vision.visualize.implicit:plot_jacobian",
        "plot_matrix": "ea_vision.visualize.matrix:plot_matrix",
        "plot_rollout": "ea_vision.visualize.rollout:plot_rollout",
        "plot_statistics": "ea_vision.visualize.statistics:plot_statistics",
        "plot_strip": "ea_vision.visualize.strip:plot_strip",
        "record": "ea_vision.visualize.figure_request:record",
        "show_page": "ea_vision.visualize.explore:show_page",
    },
)

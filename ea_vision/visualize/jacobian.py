"""A network's implicit attention: how much each pixel of the input moves the logit of a class, beside the maps.

The Jacobian of the outputs says what a network attends to whether or not it has attention; where it has, the two need
not agree.
"""

from dataclasses import replace

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import as_image, as_input
from ea_vision.recorder.loading import check_classifies
from ea_vision.recorder.recording import AttentionMaps, recordable_layers
from ea_vision.visualize.figure_options import Layers, Model, chosen_layers, spread
from ea_vision.visualize.image_maps import MEAN, AnyImage, Recording, as_batch, as_model, evaluating, record, title_of
from ea_vision.visualize.map_style import MapStyle, attention_of, map_of, photo_of, scaled
from ea_vision.visualize.sheet import Block, Row, sheet


def input_jacobian(model: nn.Module, batch: Tensor, target: int | None = None) -> tuple[Tensor, int]:
    """Return |d logit of a class / d pixel|, the largest of the channels.

    Args:
        model: in evaluation mode.
        batch: (1, C, H, W), as the model takes it.
        target: class; the model's own first choice unless given.

    Returns:
        (H, W), and the class.

    Raises:
        UsageError: a class that the model does not have.
    """
    x = batch.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = model(x)
        chosen = int(logits[0].argmax()) if target is None else target
        if not 0 <= chosen < logits.shape[1]:
            raise UsageError(f"target must be a class from 0 to {logits.shape[1] - 1}, got {target}")
        gradient, = torch.autograd.grad(logits[0, chosen], x)
    return gradient[0].abs().amax(0), chosen


def plot_jacobian(model: Model, image: AnyImage, target: int | None = None, layers: Layers = None, *,
                  width: float | None = None, **style) -> Figure:
    """Draw the Jacobian of a class, and of attention layers what every pixel gets, mean of heads and queries.

    Args:
        model, image, layers, width, **style: see `ea_vision.visualize.figure_options`; a model may also have no
            attention.
        target: class; the model's own first choice unless given.

    Raises:
        UsageError: a class or a layer that the model does not have.
    """
    loaded, image, look = as_model(model), as_image(image), MapStyle(**style)
    check_classifies(loaded)
    shown = spread(recordable_layers(loaded.model)) if layers is None else chosen_layers(layers, loaded)
    x = as_input(loaded, image)
    with evaluating(loaded.model):
        jacobian, chosen = input_jacobian(loaded.model, as_batch(loaded, [x]), target)
    maps = record(loaded, x, shown).maps if shown else AttentionMaps()
    recording = Recording(loaded, x, maps, None if isinstance(image, Tensor) else loaded.photo(image))
    name = loaded.classes[chosen] if loaded.classes else f"class {chosen}"
    subject = map_of(jacobian.float().cpu().numpy(), recording, look, f"|d {name} / d input|", part="jacobian")
    photo = replace(photo_of(recording), title="photo")
    blocks = [Block([Row([photo, subject])], enlarged=1.5,
                    bars=scaled([[subject]], replace(look, scale="all"), "jacobian", "|d logit / d pixel|"))]
    note = f"class {chosen}" + f" ({name})" * bool(loaded.classes) + ": how much each pixel moves its logit"
    if maps:
        tiles = [attention_of(recording, layer, MEAN, None, look, f"layer {layer}") for layer in maps]
        blocks.append(Block([Row(tiles)], "attention that every pixel gets", scaled([tiles], look)))
        note += "; attention: mean of heads and queries"
    return sheet(title_of(loaded), blocks, width=width, note=note)

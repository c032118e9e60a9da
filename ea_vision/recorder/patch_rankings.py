"""What patches of an image may be ranked by: attention maps, rollouts, controls, gradients, class activation maps.

A source takes images (B, 3, H, W) in 0..1 and the classes that were predicted on them, (B,), and gives scores by the
name of the ranking, (B, h, w) each, the highest first.

Shape letters: B batch, K heads, h x w a map, N = h*w its pixels, T tokens (N and a ViT's prefix tokens).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.recorder.faithfulness import Predict
from ea_vision.recorder.layouts import grid_of
from ea_vision.recorder.loading import LoadedModel
from ea_vision.recorder.maps import LayerMaps
from ea_vision.recorder.quantities import attention_rollout
from ea_vision.recorder.recording import prefix_names, record_attention

KINDS = ("layers", "heads", "rollout")
CAMS = ("GradCAM", "HiResCAM", "GradCAMPlusPlus", "XGradCAM", "EigenCAM", "EigenGradCAM", "LayerCAM")
ROWS = ("auto", "mean", "cls")


class AttentionSource:
    """Rankings by attention maps: what a layer's queries look at together.

    layers: "layer 3", the mean of its heads. heads: "layer 3, head 0". rollout: "rollout".

    Args:
        model: whose maps they are; it need not be the network that is asked for probabilities.
        layers: numbers of those that rank patches; a rollout goes through all that the model has.
        kinds: some of KINDS.
        rows: whose queries: "mean", of all patches; "cls", the class token's; "auto", the class token's where the
            classifier reads it, else of all patches.
        note: is added to the rankings' names.

    Raises:
        UsageError: "cls" of a network without a class token.
    """

    def __init__(self, model: LoadedModel, layers: Sequence[int], kinds: Sequence[str] = KINDS, rows: str = "auto",
                 note: str = "") -> None:
        has_cls = "cls" in prefix_names(model.model)
        if rows == "cls" and not has_cls:
            raise UsageError(f"the rows of a class token need a network that has one; {model.label} has none")
        self.model, self.layers, self.kinds, self.note = model, list(layers), kinds, note
        self.cls = rows == "cls" or rows == "auto" and has_cls and getattr(model.model, "global_pool", "") == "token"

    def __call__(self, images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
        with torch.no_grad(), record_attention(
                self.model.model, None if "rollout" in self.kinds else self.layers) as maps:
            self.model.model(self.model.normalize(images))
        scores = {}
        for layer in map(maps.__getitem__, self.layers):
            heads = self._looked_at(layer.attn, layer, layer)
            if "layers" in self.kinds:
                scores[f"layer {layer.number}{self.note}"] = heads.mean(1)
            if "heads" in self.kinds:
                scores.update({f"layer {layer.number}, head {head}{self.note}": heads[:, head]
                               for head in layer.heads})
        if "rollout" in self.kinds:
            through = list(maps.values())
            rollout = attention_rollout(maps)[:, None]
            scores[f"rollout{self.note}"] = self._looked_at(rollout, through[-1], through[0])[:, 0]
        return scores

    def _looked_at(self, maps: Tensor, queries: LayerMaps, keys: LayerMaps) -> Tensor:
        """(B, K, T', T) -> (B, K, h, w): the patches among the keys, as the class token or all patches look at them."""
        if self.cls and "cls" in queries.prefix_names:
            rows = maps[:, :, queries.token("cls")]
        else:  # also of a network whose class token comes in later (CaiT)
            queries.check_pixels_ask()
            rows = maps[:, :, queries.num_prefix_tokens:].mean(2)
        size = keys.key_size if maps.shape[-1] == keys.num_prefix_tokens + math.prod(keys.key_size) else keys.feat_size
        return rows[..., keys.num_prefix_tokens:].unflatten(-1, size).float()


def random_source(images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
    """All patches alike, which leaves them in their random order."""
    return {"random": torch.zeros(len(images), 1, 1)}


class CentreSource:
    """The nearer to the middle of the image, the earlier: what a map must know more than. `grid`: (h, w)."""

    def __init__(self, grid: tuple[int, int]) -> None:
        rows, cols = ((torch.arange(size) + 0.5) / size - 0.5 for size in grid)
        self.scores = -(rows[:, None] ** 2 + cols[None, :] ** 2)

    def __call__(self, images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
        return {"centre": self.scores.expand(len(images), -1, -1)}


class GradientSource:
    """What the class's log-probability loses without a patch, to first order: gradient times (image - mean colour),
    summed over the patch's pixels. It knows the network, not only its maps: a ranking to measure others by.

    Args:
        predict: from images to logits.
        mean: the colour.
        grid: (h, w).
    """

    def __init__(self, predict: Predict, mean: Sequence[float], grid: tuple[int, int]) -> None:
        self.predict, self.mean, self.grid = predict, mean, grid

    def __call__(self, images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
        images = images.detach().requires_grad_()
        with torch.enable_grad():
            logits = self.predict(images).float().log_softmax(-1)
            gradient, = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), images)
        mean = torch.tensor(self.mean, device=images.device).view(1, 3, 1, 1)
        change = (gradient * (images.detach() - mean)).sum(1, keepdim=True)
        return {"gradient": nn.functional.adaptive_avg_pool2d(change, self.grid)[:, 0]}


class CamSource:
    """Rankings by methods of pytorch-grad-cam, for the predicted class.

    Args:
        model: the network.
        methods: some of CAMS.
        layer: name of the module whose output is weighted, (B, C, h, w), or (B, T, C) of a vision transformer; None:
            the last that the network names in `feature_info`, before the last block's attention in a transformer.

    Raises:
        UsageError: pytorch-grad-cam is not installed, or there is no such module.
    """

    def __init__(self, model: LoadedModel, methods: Sequence[str], layer: str | None = None) -> None:
        try:
            import pytorch_grad_cam
            from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
        except ImportError as error:
            raise UsageError(f"{', '.join(methods)} needs pytorch-grad-cam (pip install grad-cam): {error}") from error
        self.model, self.target = model, ClassifierOutputTarget
        network, modules = model.model, dict(model.model.named_modules())
        if layer is None:
            layer = (getattr(network, "feature_info", None) or [{"module": ""}])[-1]["module"]
            layer = f"{layer}.norm1" if f"{layer}.norm1" in modules and hasattr(network, "num_prefix_tokens") else layer
        if layer not in modules or not layer:
            raise UsageError(f"the layer of class activation maps must be a module of {model.label}, got {layer!r}")
        self.cams = {method: getattr(pytorch_grad_cam, method)(
            model=network, target_layers=[modules[layer]], reshape_transform=self._as_map) for method in methods}

    def _as_map(self, output: Tensor) -> Tensor:
        """(B, T, C) of a vision transformer -> (B, C, h, w)."""
        if output.ndim == 4:
            return output
        prefix = len(prefix_names(self.model.model))
        grid = grid_of(output.shape[1] - prefix, self.model.img_size)
        if grid is None:
            raise UsageError(f"class activation maps need {prefix} prefix tokens and a grid of patches; "
                             f"the output of --cam-layer in {self.model.label} is {list(output.shape)}")
        return output[:, prefix:].transpose(1, 2).unflatten(-1, grid)

    def __call__(self, images: Tensor, classes: Tensor) -> Mapping[str, Tensor]:
        targets = [self.target(number) for number in classes.tolist()]
        batch = self.model.normalize(images)
        with torch.enable_grad():
            return {method: torch.from_numpy(cam(input_tensor=batch.clone(), targets=targets))
                    for method, cam in self.cams.items()}

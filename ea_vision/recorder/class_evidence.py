"""Evidence of a class in attention maps: the positive part of gradient times attention.

With the logit of a class, the evidence of a layer is the positive part of (d logit / d attention) * attention, of any
network that is recorded. `quantities.class_rollout` takes it through the layers.

* `Generic attention-model explainability` (Chefer, Gur, Wolf 2021) - https://arxiv.org/abs/2103.15679
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ea_vision.base.errors import UsageError
from ea_vision.models.modes import evaluating
from ea_vision.ops import use_implementation
from ea_vision.recorder.interception import FORMS, Hooks
from ea_vision.recorder.maps import AttentionMaps

EVIDENCE = "class_evidence"  # a part of recorded maps
FUSED = F.scaled_dot_product_attention


class _Follow(TorchFunctionMode):
    """Keep what each of some layers forms in a forward with gradients: its attention and None, or the output of fused
    attention and its values.

    Attributes:
        running: names of the layers that run, the innermost last.
        formed: by name.
    """

    def __init__(self):
        super().__init__()
        self.running: list[str] = []
        self.formed: dict[str, tuple[Tensor, Tensor | None]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
        result = func(*args, **kwargs)
        if not self.running:
            return result
        formed = None
        if func is F.multi_head_attention_forward:
            # its maps are a view of what its output is computed from
            formed = (result[1]._base, None)
        elif func is FUSED:
            formed = (result, kwargs["value"] if "value" in kwargs else args[2])
        elif func in FORMS and FORMS[func](result, *args, **kwargs) is result:
            formed = (result, None)
        if formed:
            self.formed[self.running[-1]] = formed
        return result


@torch.inference_mode(False)
@torch.enable_grad()
def class_scores(
    model: nn.Module, batch: Tensor, classes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a network that gives logits (B, classes), or an object with `.logits`.

    Args:
        batch: (B, C, H, W).
        classes: one for each image; None: the predicted ones.

    Returns:
        the network's input and the sum of the classes' logits, between which autograd computes gradients; the logits;
        the classes (B,).

    Raises:
        UsageError: there are no such logits, they have no gradients, or they lack a class.
    """
    x = batch.detach().clone().requires_grad_()
    output = model(x)
    logits = getattr(output, "logits", output)  # transformers' models have them inside
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.requires_grad:
        raise UsageError(
            f"a network that gives logits (images, classes) with gradients is required, got {type(model).__name__}"
        )
    count = logits.shape[1]
    if classes is None:
        numbers = logits.argmax(1)
    elif all(index in range(count) for index in classes):
        numbers = torch.tensor(classes, device=logits.device)
    else:
        raise UsageError(f"a class must lie between 0 and {count - 1}, got {list(classes)}")
    return x, logits.gather(1, numbers[:, None]).sum(), logits, numbers


def add_class_evidence(
    model: nn.Module, batch: Tensor, maps: AttentionMaps, classes: Sequence[int] | None = None
) -> Tensor:
    """Add the part EVIDENCE, (B, K, T, T), to the maps of each recorded layer.

    Args:
        model, classes: see `class_scores`.
        batch: (B, C, H, W), the images of which `maps` were recorded, with all heads.
        maps: with "attn".

    Returns:
        the logits, (B, classes).

    Raises:
        UsageError: see `class_scores`, and a layer whose maps do not act through one softmax.
    """
    follow = _Follow()
    with Hooks() as hooks, evaluating(model):
        for layer in maps.values():
            module = model.get_submodule(layer.name)
            hooks.add(
                module.register_forward_pre_hook,
                lambda *_, name=layer.name: follow.running.append(name),
            )
            hooks.add(module.register_forward_hook, lambda *_: follow.running.pop())
        with use_implementation("reference"), follow:
            _, total, logits, _ = class_scores(model, batch, classes)
    without = [str(layer) for layer in maps.values() if layer.name not in follow.formed]
    if without:
        raise UsageError(f"attention layer {without[0]} forms no map with gradients: choose others")
    tensors = [tensor for tensor, _ in follow.formed.values()]
    gradients = torch.autograd.grad(total, tensors, allow_unused=True)
    for layer, (tensor, value), gradient in zip(
        maps.values(), follow.formed.values(), gradients, strict=True
    ):
        if gradient is None:  # such as the last map of a network that reads the class token alone
            gradient = torch.zeros_like(tensor)
        if value is not None:
            groups = gradient.shape[-3] // value.shape[-3]
            gradient = gradient @ value.detach().repeat_interleave(groups, -3).mT
        attn = layer.formed("attn")
        if gradient.numel() != attn.numel():
            raise UsageError(
                f"attention layer {layer} mixes its maps after the softmax: choose others"
            )
        layer.save(EVIDENCE, (gradient.reshape(attn.shape) * attn).clamp_min(0))
    return logits.detach()

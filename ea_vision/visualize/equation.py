"""The equation by which an evolving layer computes its logits, in words."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ea_vision.recorder.recording import AttentionLayer, LayerMaps


def before_shares(model: nn.Module, name: str) -> dict[str, float]:
    """Return the weights of the recorded parts in the input of a layer's convolution; {} if it convolves no maps."""
    evolution = getattr(model.get_submodule(name), "evolution", None)
    return evolution.before_shares() if evolution else {}


def _sum(*terms: tuple[float, str]) -> str:
    """Write a weighted sum, without terms of weight 0; a weight of 1 is not written."""
    written = []
    for weight, term in terms:
        if weight == 1:
            written.append(term)
        elif weight != 0:
            factor = f"({term})" if " + " in term and not term.startswith("relu") else term
            written.append(f"{weight:.2g} {factor}")
    return " + ".join(written) or "0"


def equation(model: nn.Module, layers: Sequence[AttentionLayer | LayerMaps]) -> str:
    """Write the equation of the first layer that convolves previous maps, with its gates (learnable ones: their mean);
    "" if there is no such layer."""
    convolving = [layer for layer in layers if before_shares(model, layer.name)]
    if not convolving:
        return ""
    first = convolving[0]
    shares = before_shares(model, first.name)
    gates = model.get_submodule(first.name).evolution.gates()
    mean = {}
    for name, gate in gates.items():
        values = torch.as_tensor(gate).detach().float()
        mean[name] = values.mean().item()
    previous = (shares.get("prev_logits", 0.0), "previous")
    self_term = (shares.get("self_logits", 0.0), "own")
    mixed = _sum(previous, self_term)
    convolved = f"relu(conv({mixed}))"
    if "self_logits" in shares:
        share = mean.get("beta", 1.0)
        rest = mixed
    else:
        share = mean.get("alpha", 1.0)
        rest = "own"
    logits = _sum((share, convolved), (1 - share, rest))
    learned = any(isinstance(gate, Tensor) for gate in gates.values())
    whose = f"layer {first.number}" if learned else "a layer"
    return f"{whose}: logits = {logits}, attention = softmax(logits)"

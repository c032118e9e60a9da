"""timm's Muon with fewer calls: matrices of one shape are orthogonalised together.

Muon replaces each matrix's update by its nearest orthogonal matrix, in five Newton-Schulz steps of three products
(https://kellerjordan.github.io/posts/muon/). The products are small, so a GPU waits for the calls. Here all matrices of
one shape form one batch. On a CPU the updates are bit-identical to timm's; state and state dicts are timm's.
"""

from collections import defaultdict
from collections.abc import Iterator

import timm.optim
import torch
from timm.optim import muon as timms
from torch import Tensor

# on a CPU, batched products of smaller matrices sometimes round differently
LEAST_SIDE_ON_CPU = 32


class BatchedMuon(timm.optim.Muon):
    """timm's `Muon` with batched matrices.

    timm's own code still runs the first step of a parameter, AdamW's parameters, AdaMuon, and the options
    conv_mode="batched", scale_eps and capturable.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step; see timm's `Muon`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done = []
        for group in self.param_groups:
            for params in self._batches(group):
                self._update(group, params)
                done += params
        gradients = [param.grad for param in done]
        for param in done:
            param.grad = None  # timm's step leaves these parameters alone
        super().step()
        for param, gradient in zip(done, gradients, strict=True):
            param.grad = gradient
        return loss

    def _batches(self, group: dict) -> Iterator[list[Tensor]]:
        """Yield lists of the group's matrices of one shape."""
        unusual = group.get("scale_eps") or group.get("capturable") or torch.is_tensor(group["lr"])
        if unusual or group.get("algo", "muon") != "muon" or group["conv_mode"] != "flatten":
            return
        params_by_shape = defaultdict(list)
        for param in group["params"]:
            state = self.state.get(param, {})
            if param.grad is not None and state.get("use_muon") and "momentum_buffer" in state:
                params_by_shape[param.shape, param.dtype, param.device].append(param)
        yield from params_by_shape.values()

    def _update(self, group: dict, params: list[Tensor]) -> None:
        """Update parameters of one shape as timm's Muon does: decay, momentum, Newton-Schulz, rate by shape."""
        gradients = [param.grad for param in params]
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
        updates = buffers
        if group["nesterov"]:
            updates = torch._foreach_lerp(gradients, buffers, group["momentum"])
        orthogonal = _orthogonalised(torch.stack(updates).flatten(2), group)
        scale = 1.0
        if group["adjust_lr_fn"]:
            scale = timms.get_lr_scale(orthogonal.shape, group["adjust_lr_fn"])
        steps = orthogonal.to(params[0].dtype).unflatten(2, params[0].shape[1:])
        torch._foreach_add_(params, steps.unbind(0), alpha=-group["lr"] * scale)


def _orthogonalised(matrices: Tensor, group: dict) -> Tensor:
    """Return the nearest orthogonal matrices of (n, rows, columns), by timm's Newton-Schulz steps in bfloat16."""
    options = {
        "steps": group["ns_steps"],
        "coefficients": timms.resolve_ns_coefficients(
            group["ns_coefficients"], timms._COEFFICIENTS
        ),
        "eps": group["eps"],
        "safety_factor": group["safety_factor"],
    }
    if matrices.device.type == "cpu" and min(matrices.shape[1:]) < LEAST_SIDE_ON_CPU:
        each = [timms.zeropower_via_newtonschulz(matrix, **options) for matrix in matrices]
        return torch.stack(each)
    return timms.zeropower_via_newtonschulz(matrices, **options)


def batch_muon(optimizer: torch.optim.Optimizer) -> None:
    """Turn timm's Muon, in place, into `BatchedMuon`; leave other optimisers as they are."""
    if type(optimizer) is timm.optim.Muon:
        optimizer.__class__ = BatchedMuon

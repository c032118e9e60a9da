"""Count the host's calls in a training step on a GPU, without a GPU: CUDA tensors are fake, nothing is computed.

    python -m experiments.gpu_calls                              # experiments/results/gpu-calls.csv
    python -m experiments.gpu_calls --networks ea_aa_resnet50 --by-operator

Every operation that reaches PyTorch's dispatcher below autograd counts as one call: kernels, views and new tensors, and
each of our Triton operators. Counted are the forward pass with the loss and the backward pass, in bfloat16 autocast and
channels-last.
"""

import argparse
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pandas as pd
import timm
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import ea_vision  # noqa: F401
from ea_vision.ops import triton_attention

CAPABILITY = (9, 0)
BOOKKEEPING = ("prim.device.default", "aten.detach.default")  # neither launches nor allocates
NETWORKS = {
    "resnet50": {},
    "aa_resnet50": {},
    "pa_aa_resnet50": {},
    "ea_aa_resnet50": {},
    "ea_conv_transformer_cifar": {},
    "ea_conv_transformer_cifar with qk_norm": {"qk_norm": True},
    "ea_vit_small_patch16_224": {},
}


@contextmanager
def pretended_gpu():
    """Let autocast and the Triton kernels believe that there is a GPU."""
    with (
        mock.patch.object(triton_attention, "_capability", lambda device: CAPABILITY),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *args: True),
    ):
        yield


class CountCalls(TorchDispatchMode):
    """Counts calls by operator while the mode is active."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name not in BOOKKEEPING:
            self.calls[name] += 1
        return function(*args, **kwargs or {})


def walk_backward(loss: torch.Tensor) -> None:
    """Run the backward pass node by node, in the engine's order.

    The engine itself asks the driver for streams, which a machine without a GPU does not have.
    """
    root = loss.grad_fn
    waiting = Counter()  # node -> number of gradients that have not arrived yet
    seen = {root}
    stack = [root]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None:
                waiting[child] += 1
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
    received = {root: {0: torch.ones_like(loss)}}
    ready = [root]
    while ready:
        ready.sort(key=lambda node: node._sequence_nr())
        node = ready.pop()
        inputs = received.pop(node, {})
        children = [edge for edge in node.next_functions if edge[0] is not None]
        for (child, place), gradient in zip(children, run_node(node, inputs), strict=True):
            if gradient is not None:
                gradient = gradient.sum_to_size(child._input_metadata[place].shape)
                slots = received.setdefault(child, {})
                slots[place] = slots[place] + gradient if place in slots else gradient
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)


def run_node(node, inputs: dict[int, torch.Tensor]) -> list:
    """Return the gradients that a node passes to other nodes; a parameter's gradient ends here."""
    if not node.next_functions:
        for gradient in inputs.values():
            gradient.detach()  # as autograd does when it stores a parameter's gradient
        return []
    if not inputs:
        return [None for child, _ in node.next_functions if child is not None]
    gradients = [inputs.get(place) for place in range(len(node._input_metadata))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        returned = node.apply(*gradients)
        returned = returned if isinstance(returned, tuple) else (returned,)
        needs_grad = (
            node.needs_input_grad
        )  # one per argument, also for arguments that are not tensors
        return [x for x, needed in zip(returned, needs_grad, strict=True) if needed]
    returned = node(*gradients)
    returned = returned if isinstance(returned, tuple) else (returned,)
    edges = zip(returned, node.next_functions, strict=True)
    return [x for x, (child, _) in edges if child is not None]


def fake_network(name: str) -> torch.nn.Module:
    """Return a network in training mode, channels-last, whose tensors are fake ones on a GPU."""
    with unset_fake_temporarily(), torch.device("cpu"):
        model = timm.create_model(name.split(" ")[0], **NETWORKS.get(name, {})).train()
        model = model.to(memory_format=torch.channels_last)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = torch.nn.Parameter(fake_of(parameter))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = fake_of(buffer)
    return model


def fake_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def count(name: str, batch: int = 8) -> tuple[Counter, Counter]:
    """Return the calls by operator in the forward pass and in the backward pass."""
    size = 32 if "cifar" in name else 224
    with pretended_gpu(), FakeTensorMode(), torch.device("cuda"):
        model = fake_network(name)
        images = torch.empty(batch, 3, size, size).to(memory_format=torch.channels_last)
        targets = torch.zeros(batch, dtype=torch.int64)
        with CountCalls() as forward, torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), targets)
        with torch.no_grad(), CountCalls() as backward:
            walk_backward(loss)
    return forward.calls, backward.calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--by-operator", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in args.networks:
        forward, backward = count(name)
        rows.append({"network": name, "forward": forward.total(), "backward": backward.total()})
        if args.by_operator:
            table = pd.DataFrame({"forward": forward, "backward": backward}).fillna(0).astype(int)
            print(name, table.sort_values("forward", ascending=False).to_string(), sep="\n")
    print(pd.DataFrame(rows).to_csv(index=False), end="")


if __name__ == "__main__":
    main()

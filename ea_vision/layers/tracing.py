"""Modules that torch.fx keeps whole."""

import functools

from timm.models import register_notrace_module
from torch import fx, nn


def record_whole(module: nn.Module, x: fx.Proxy, *args, **kwargs) -> fx.Proxy:
    """Record a call of the module from inside its forward, which a tracer has entered."""
    path = x.tracer.path_of_module(module)
    return x.tracer.create_proxy("call_module", path, (x, *args), kwargs)


def keep_whole(module_class: type[nn.Module]) -> type[nn.Module]:
    """Make every tracer of torch.fx record a module of this class as one call, as a class decorator.

    Use it for forwards whose steps depend on sizes or hooks. `register_notrace_module` tells timm's tracer. The tracers
    of torch and torchvision enter the forward, which then records the call itself.
    """
    forward = module_class.forward

    @functools.wraps(forward)
    def forward_or_record(self, x, *args, **kwargs):
        if isinstance(x, fx.Proxy):
            return record_whole(self, x, *args, **kwargs)
        return forward(self, x, *args, **kwargs)

    module_class.forward = forward_or_record
    return register_notrace_module(module_class)

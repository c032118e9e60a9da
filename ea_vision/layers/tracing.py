"""Modules that torch.fx keeps whole."""

import functools

from timm.models import register_notrace_module
from torch import fx, nn


def keep_whole(module_class: type[nn.Module]) -> type[nn.Module]:
    """Make every tracer of torch.fx record a module of this class as one call, as a class decorator.

    Use it for forwards whose steps depend on sizes or hooks. `register_notrace_module` tells timm's tracer. The tracers
    of torch and torchvision enter the forward, which then records the call itself.
    """
    forward = module_class.forward

    @functools.wraps(forward)
    def forward_or_record(self, x, *args, **kwargs):
        if isinstance(x, fx.Proxy):
            path = x.tracer.path_of_module(self)
            return x.tracer.create_proxy("call_module", path, (x, *args), kwargs)
        return forward(self, x, *args, **kwargs)

    module_class.forward = forward_or_record
    return register_notrace_module(module_class)

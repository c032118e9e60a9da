"""The optimiser of a run (one of timm's, by name) with its parameter groups, and the learning rate of each update.

Schedules are timm's; update u of an epoch of U updates is at epoch u / U.

    linear      from 0 to lr over the warm-up, down to min_lr at the end
    cosine      linear warm-up, one cosine from lr to min_lr; or, with cycle_epochs, restarts (Loshchilov and Hutter
                2017, https://arxiv.org/abs/1608.03983; equation 7 of the PA paper): cycle i lasts
                T_i = cycle_epochs * lr_cycle_mul**i epochs and
                lr = min_lr + (lr_max - min_lr) (1 + cos(pi t / T_i)) / 2
    multistep   linear warm-up, then multiplied by decay_rate at each of decay_milestones
    step        multiplied by decay_rate every decay_epochs epochs, counted from epoch 0, which may be a fraction; the
                first updates are a linear warm-up instead (tensorflow/tpu, mnasnet_utils.py)
    constant    lr, after the warm-up
"""

import inspect

import timm.optim
import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler
from torch import nn

from ea_vision.base.errors import UsageError, as_usage_error, near_matches
from ea_vision.engine.config import TrainConfig
from ea_vision.engine.muon import batch_muon
from ea_vision.layers import attention_layers, learnable_gates
from ea_vision.layers.across.token_conv import TokenConv

LOOKAHEAD = "lookahead_"  # before the name of the optimiser that it wraps
# what timm and torch raise for values that do not fit
MISFITS = (TypeError, ValueError, AssertionError, LookupError)
# A keyword of Muon that older releases of timm lack: the rate of its AdamW divided by that of the matrices.
FALLBACK_SCALE = "fallback_lr_scale"
MUON_SCALES_FALLBACK = FALLBACK_SCALE in inspect.signature(timm.optim.Muon).parameters


def check_optimizer_name(name: str) -> None:
    """Raise UsageError, with near matches, if this is not a name for --opt: one of timm's, or lookahead_ and one."""
    optimizers = timm.optim.list_optimizers()
    if name.removeprefix(LOOKAHEAD) not in optimizers:
        optimizers += [LOOKAHEAD + other for other in optimizers]
        raise UsageError(
            f"unknown optimiser {name!r}; {near_matches(name, optimizers, 'optimisers')}"
        )


def build_optimizer(
    config: TrainConfig, model: nn.Module, images_per_update: int
) -> torch.optim.Optimizer:
    """Return the timm optimiser of the config.

    Norms, biases and the parameters that `model.no_weight_decay()` names have no weight decay; frozen parameters are in
    no group. timm's schedulers multiply the rate by a group's `lr_scale`; `config.layer_decay` gives each layer one.
    The parameters of attention maps and the learnable gates (alpha, beta) of evolutions form the last groups, whose
    scales are multiplied by `config.attention_lr` and `config.gate_lr`.

    Raises:
        UsageError: unknown optimiser (naming near matches), a keyword or value it refuses, attention_lr for a model
            without attention layers of ea_vision, or gate_lr for one without learnable gates.
    """
    check_optimizer_name(config.opt)
    lr = config.peak_lr(images_per_update)
    kwargs = dict(config.opt_kwargs)
    scale = 1.0
    if config.opt.endswith("muon") and not MUON_SCALES_FALLBACK:
        scale = kwargs.pop(FALLBACK_SCALE, 1.0)
    layer_decay = getattr(config, "layer_decay", 1.0)  # an option of classifiers
    values = {"lr": f"{lr:g}", "momentum": config.momentum, **config.opt_kwargs}
    shown = " ".join(f"{key}={value}" for key, value in values.items())
    with as_usage_error(f"optimiser {config.opt} refuses {shown}", MISFITS):
        optimizer = timm.optim.create_optimizer_v2(
            model,
            config.opt,
            lr=lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=None if layer_decay == 1 else layer_decay,
            **kwargs,
        )
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", 1.0)
    # The log shows the first group's rate, so the groups whose rate is lr come first.
    optimizer.param_groups.sort(key=lambda group: -group["lr_scale"])
    _scale_rates(optimizer, model, config)
    inner = getattr(optimizer, "_base_optimizer", optimizer)  # what Lookahead wraps
    _schedule_fallback(inner, scale)
    batch_muon(inner)
    return optimizer


def _schedule_fallback(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Let the AdamW within an older timm's Muon follow the groups' rates, times `scale`, as in newer releases.

    In older releases it has a rate of its own, `adamw_lr`, which neither schedules nor groups change. Newer ones also
    turn a given `adamw_lr` into a multiple of `lr`.
    """
    if "adamw_lr" not in optimizer.defaults:
        return
    if optimizer.defaults["lr"] > 0:
        scale = scale * optimizer.defaults["adamw_lr"] / optimizer.defaults["lr"]

    def follow(optimizer: torch.optim.Optimizer, *_) -> None:
        for group in optimizer.param_groups:
            group["adamw_lr"] = scale * group["lr"]

    optimizer.register_step_pre_hook(follow)


# Parameters of attention maps by the first part of their name in the layer: ours, timm's and torch's.
MAP_PARAMETERS = {
    "qkv",
    "q_proj",
    "k_proj",
    "q_bias",
    "in_proj_weight",
    "in_proj_bias",
    "height_rel",
    "width_rel",
    "relative_position_bias_table",
    "evolution",
    "value_residual",
}


def _scale_rates(optimizer: torch.optim.Optimizer, model: nn.Module, config: TrainConfig) -> None:
    """Move the parameters of attention maps and the learnable gates to groups of their own, behind the others, with
    their multiples of the rate. Parameters of maps are queries, keys, values in the same matrix, position tables, map
    convolutions, token_conv and value_residual."""
    maps = []  # includes gates, whose scale is set last
    for layer in attention_layers(model):
        names = MAP_PARAMETERS
        # Attention that is added to a trained convolution is new as a whole.
        if getattr(layer, "fusion", "") == "add":
            names = MAP_PARAMETERS | {"proj"}
        for name, parameter in layer.named_parameters():
            if name.split(".")[0] in names:
                maps.append(parameter)
    for module in model.modules():
        if isinstance(module, TokenConv):
            maps.extend(module.parameters())
    gates = list(learnable_gates(model).values())
    scales = {}
    for option, parameters, needed in (
        ("attention_lr", maps, "attention layers of ea_vision"),
        ("gate_lr", gates, "learnable gates (alpha, beta)"),
    ):
        scale = getattr(config, option)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if scale != 1 and not trained:
            raise UsageError(f"{option} {scale:g} needs {needed}, and the model has none")
        scales.update(dict.fromkeys(trained, scale))
    groups = []
    for scale in dict.fromkeys((1, config.attention_lr, config.gate_lr)):
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if scales.get(p, 1) == scale]
            scaled = {"params": parameters, "lr_scale": group["lr_scale"] * scale}
            if parameters:
                groups.append({**group, **scaled})
    optimizer.param_groups[:] = groups  # in place: Lookahead and what it wraps share the list


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict, config: TrainConfig, source: str, saved: dict
) -> None:
    """Load an optimiser's state (counters and averages) from `source`.

    Values of the groups that options set remain this run's. All others are loaded, since some optimisers count in their
    groups (Lookahead its steps, Prodigy its estimates).

    saved: the options that the state was made with.

    Raises:
        UsageError: the state is of another optimiser, or of other parameters.
    """
    if saved["opt"] != config.opt:
        raise UsageError(
            f"optimiser state of {source} is of {saved['opt']} and does not fit {config.opt}: begin a run with "
            "its weights (--pretrained-path)"
        )
    option_keys = {"lr", "initial_lr", "lr_scale", "weight_decay", "momentum"}
    option_keys.update(config.opt_kwargs, saved["opt_kwargs"])
    new_options = []
    for group in optimizer.param_groups:
        new_options.append({key: value for key, value in group.items() if key in option_keys})
    with as_usage_error(f"optimiser state of {source} does not fit {config.opt}", MISFITS):
        optimizer.load_state_dict(state)
    for group, ours in zip(optimizer.param_groups, new_options, strict=True):
        group.update(ours)


def build_schedule(config: TrainConfig, optimizer: torch.optim.Optimizer, updates_per_epoch: int):
    """Return a timm scheduler; call `step_update(n)` after n updates, n = 0 included."""
    total = round(config.epochs * updates_per_epoch)
    warmup = config.warmup_updates(updates_per_epoch)
    common = {
        "warmup_t": warmup,
        "t_in_epochs": False,
        "warmup_prefix": config.sched in ("linear", "cosine"),
    }
    if config.sched == "linear":
        return PolyLRScheduler(
            optimizer, max(total - warmup, 1), power=1.0, lr_min=config.min_lr, **common
        )
    if config.sched == "cosine":
        first = round(config.cycle_epochs * updates_per_epoch) or max(total - warmup, 1)
        # The cycle limit only has to exceed the number of cycles that fit.
        return CosineLRScheduler(
            optimizer,
            first,
            lr_min=config.min_lr,
            cycle_mul=config.lr_cycle_mul,
            cycle_limit=total // first + 1,
            **common,
        )
    if config.sched == "step":
        return StepLRScheduler(
            optimizer, config.decay_epochs * updates_per_epoch, config.decay_rate, **common
        )
    milestones = sorted(config.decay_milestones) if config.sched == "multistep" else []
    # timm's milestone m acts from index m - 1 on, hence the + 1.
    return MultiStepLRScheduler(
        optimizer,
        [round(e * updates_per_epoch) + 1 for e in milestones],
        config.decay_rate,
        **common,
    )

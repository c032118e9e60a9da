"""Options of a training run: a dataclass, filled from its defaults, then a recipe file, then the command line.

Every field becomes a flag and a recipe key of the same name. An unknown key is an error that names its near matches.
"""

import argparse
import copy
import dataclasses
import json
import logging
import math
import typing
from collections import ChainMap
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from ea_vision.base import devices
from ea_vision.base.errors import CommandParser, UsageError, as_usage_error, near_matches
from ea_vision.base.processes import MOST_WORKERS
from ea_vision.zoo.preparation import channel_statistics

log = logging.getLogger(__name__)
GROUPS = (
    "run",
    "model",
    "data",
    "augmentation",
    "loss",
    "length and batch",
    "optimiser",
    "learning rate",
    "precision and speed",
    "evaluation",
    "checkpoints and logs",
)
COMPILE_MODES = (  # torch.compile's
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
# an option of a trainer, or an entry of its notes: the first of these that is there tells the trainer
TRAINERS = {
    "eval_resize": "train-imagenet",
    "anchors": "train-detection",
    "category_ids": "train-detection",
    "img_size": "train-cifar",
}


def option(
    default: Any,
    help: str,
    group: str = "",
    *,
    choices: tuple[str, ...] = (),
    minimum: float = 0,
    maximum: float = math.inf,
    above: float = -math.inf,
    not_with: str = "",
    goes_with: str = "",
    bare: str = "",
    resume: bool = False,
):
    """Return a field of an options dataclass that is part of the experiment: it must not change on resume.

    Args:
        default: its value if neither recipe nor command line sets it.
        help: for --help; states the unit.
        group: title of the options among which --help-all lists it; default: that of the option which it replaces, or
            which stands before it.
        choices, minimum, maximum, above: the values it allows; `above` is an exclusive minimum.
        not_with: an option that excludes this one: while that has a value, this one must keep its default.
        goes_with: an option that this one needs: while that has no value, this one must keep its default.
        bare: the option's value if its flag is given without one.
        resume: whether it may change when a run is resumed.
    """
    rules = SimpleNamespace(**locals())
    return dataclasses.field(default_factory=lambda: copy.copy(default), metadata={"rules": rules})


# an option that is not part of the experiment: it may change when a run is resumed
setting = partial(option, resume=True)


@dataclass
class TrainConfig:
    """The options of all trainers; a trainer's subclass adds those of its data and its task.

    Keywords of a subclass are other defaults of inherited options: class Mine(TrainConfig, lr=0.01).

    Raises:
        TypeError: a keyword is not an inherited option.
    """

    def __init_subclass__(cls, **defaults):
        inherited = ChainMap(*(getattr(base, "__dataclass_fields__", {}) for base in cls.__bases__))
        for name, default in defaults.items():
            if name not in inherited:
                near = near_matches(name, inherited, "options")
                raise TypeError(f"{cls.__name__} inherits no option {name!r}; {near}")
            cls.__annotations__[name] = inherited[name].type
            rules = vars(inherited[name].metadata["rules"])
            setattr(cls, name, option(**{**rules, "default": default}))
        for name, field in vars(cls).items():
            if name in inherited and isinstance(field, dataclasses.Field):
                rules = field.metadata["rules"]
                rules.group = rules.group or inherited[name].metadata["rules"].group

    model: str = option(
        "ea_conv_transformer_cifar", "registered timm model, ours or timm's", "model"
    )
    model_kwargs: dict = option({}, "further keywords of the model, as key=value ...")
    pretrained: bool = option(
        False,
        "begin with timm's weights of the model; the classifier is a new one if the data has "
        "another number of classes",
    )
    pretrained_path: str = setting(
        "",
        "begin with the weights of a file or run folder instead; a transformer with evolving "
        "maps also takes those of the plain one",
    )
    mean: list[float] = option(
        [],
        "mean of images in 0..1, by channel; empty: that of the run in pretrained_path, "
        "else the model's",
        goes_with="std",
    )
    std: list[float] = option([], "their standard deviation, likewise", goes_with="mean")
    freeze: str = option(
        "",
        "names of modules and parameters that are not trained, such as patch_embed,blocks.0,blocks.1",
    )

    recipe: str = setting("fast", "name in ea_vision/recipes, a YAML file, or none", "run")
    data_dir: str = setting("", "folder of the data set; empty: the cache folder's", "data")
    output: str = setting("", "the run's own folder; empty: runs/DATASET-MODEL", "run")
    resume: str = setting(
        "auto",
        "auto: continue from the newest valid checkpoint of --output, or begin; "
        "none: begin; PATH: continue from this checkpoint or run folder",
    )
    seed: int = option(
        0, "seed of weights, order, augmentation and held-out images", maximum=2**31 - 1
    )
    device: str = setting("auto", f"{devices.HELP}; auto: torch's accelerator if there is one")
    dist_timeout: float = setting(
        10.0, "minutes that processes wait for one that does not answer", above=0.0
    )

    workers: int = setting(
        2, "threads that decode images; 0: in this process", "data", maximum=MOST_WORKERS
    )

    epochs: float = setting(
        10, "passes over the training images, such as 4.3", "length and batch", above=0
    )
    # On resume only the images of an update must stay the same, which `differences` compares.
    batch_size: int = setting(128, "images per process and step", minimum=1)
    grad_accum_steps: int = setting(1, "batches added up for one update of the weights", minimum=1)
    total_batch: int = setting(
        0,
        "images of an update over all processes, split into batches of at most batch_size "
        "whose gradients are added up; 0, or if the command line sets only batch_size or "
        "grad_accum_steps: batch_size x grad_accum_steps x processes",
    )

    opt: str = option(
        "sgd",
        "timm optimiser, also lookahead_NAME (sgd: with Nesterov momentum; momentum: with plain "
        "momentum; muon: AdamW for parameters that are not matrices)",
        "optimiser",
    )
    opt_kwargs: dict = option(
        {},
        "further keywords of the optimiser, as key=value ..., such as muon's "
        "fallback_lr_scale=0.5 (learning rate of its AdamW as a multiple of lr)",
    )
    momentum: float = option(0.9, "momentum of the optimiser", maximum=1.0)
    weight_decay: float = option(5e-4, "weight decay (not of norms, biases and position tables)")
    clip_grad: float = option(0.0, "largest norm of the gradient; 0: no limit")
    attention_lr: float = option(
        1.0,
        "learning-rate multiplier of the attention parameters (q, k, v, position tables, "
        "map convolutions, token_conv, value_residual)",
    )
    gate_lr: float = option(
        1.0, "learning-rate multiplier of learnable gates (a model's alpha and beta)"
    )
    model_ema_decay: float = option(
        0.0,
        "decay, per update, of the averaged weights that are evaluated and exported; 0: off",
        maximum=1.0,
    )
    model_ema_warmup: bool = option(True, "let the decay of the average grow from 0 at the start")

    lr: float = option(
        0.2,
        "peak learning rate; with lr_base_size that of updates of so many images (timm: lr_base)",
        "learning rate",
    )
    lr_base_size: int = option(
        0, "if not 0, lr is for updates of this many images and is scaled to the actual ones"
    )
    sched: str = option(
        "linear",
        "learning rate over time; linear: line up, line down; cosine: warm-up, then cosine "
        "cycles; multistep: warm-up, then factors at decay_milestones; step: warm-up, then a "
        "factor every decay_epochs",
        choices=("linear", "cosine", "multistep", "step", "constant"),
    )
    warmup_epochs: float | str = option(
        "20%", "epochs of linear warm-up from 0; 20%: a fifth of all"
    )
    lr_base_scale: str = option(
        "auto",
        "with lr_base_size: how lr grows with the images of an update; auto, as in timm: sqrt for "
        "LAMB and the optimisers with ada in their name, linear for others",
        choices=("auto", "linear", "sqrt"),
    )
    min_lr: float = option(0.0, "lowest learning rate")
    cycle_epochs: float = option(0.0, "cosine: epochs of the first cycle; 0: one cycle for all")
    lr_cycle_mul: float = option(
        1.0, "cosine: each cycle is this many times longer than the one before", minimum=1.0
    )
    decay_milestones: list[float] = option(
        [], "multistep: epochs at which the rate is multiplied by decay_rate"
    )
    decay_epochs: float = option(
        30.0,
        "step: epochs, or a fraction of one, after which the rate is multiplied by decay_rate",
        above=0.0,
    )
    decay_rate: float = option(0.1, "step, multistep: the factor", maximum=1.0)

    amp: str = option(
        "none",
        "precision of the forward pass; --amp alone: bfloat16",
        "precision and speed",
        choices=("none", "bfloat16", "float16"),
        bare="bfloat16",
    )
    compile: bool = setting(False, "compile the model with torch.compile")
    compile_mode: str = setting(
        "default",
        "mode of torch.compile; reduce-overhead: CUDA graphs, for networks whose kernels are "
        "short, such as those of CIFAR",
        choices=COMPILE_MODES,
        goes_with="compile",
    )
    channels_last: bool = setting(False, "keep images and weights channels-last in memory")
    sync_bn: bool = option(False, "batch statistics over all processes (CUDA only)")
    dist_bn: str = option(
        "broadcast",
        "statistics of BatchNorm in evaluation; broadcast: the first process's; reduce: the mean "
        "of all",
        choices=("broadcast", "reduce"),
    )
    grad_checkpointing: bool = setting(
        False,
        "compute activations again in the backward pass: less memory, about a "
        "third more time; not all models support it",
    )

    eval_batch_size: int = option(
        500, "images per process and evaluation step", "evaluation", minimum=1
    )
    eval_epochs: int = setting(
        1, "epochs between evaluations; the last epoch is always evaluated", minimum=1
    )
    test: bool = setting(
        True,
        "test a finished run on the test images; --no-test: do not, which needs images held out",
    )

    checkpoint_steps: int = setting(
        0, "updates between checkpoints inside an epoch; 0: at its end only", "checkpoints and logs"
    )
    snapshot_epochs: int = setting(
        0, "epochs between snapshots of the weights, kept in RUN/snapshots; 0: none"
    )
    log_steps: int = setting(50, "updates between rows of speed.csv and lines of the log; 0: none")
    tensorboard: bool = setting(False, "write TensorBoard events into the run folder")
    wandb: str = setting("", "Weights & Biases project; empty: none")

    # Not an option: names of the model keywords that only the recipe sets, which a model may lack.
    optional_kwargs = frozenset()
    # Whether pairs of images of a batch are mixed, so that the batch size must be even.
    mixes = False

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for name, rules in self.rules().items():
            setattr(self, name, _checked(name, getattr(self, name), hints[name], rules))
        self._check_pairs()
        self._take_statistics()
        if self.epochs == int(self.epochs):
            self.epochs = int(self.epochs)
        if isinstance(self.warmup_epochs, float) and self.warmup_epochs > self.epochs:
            raise UsageError(
                f"warmup_epochs must be at most the {self.epochs:g} epochs of the run, got "
                f"{self.warmup_epochs:g}; --warmup-epochs 20% is a fifth of them"
            )
        if self.min_lr > self.lr:
            raise UsageError(f"min_lr must be at most lr ({self.lr:g}), got {self.min_lr:g}")
        if self.cuda_graphs and self.grad_accum_steps > 1:
            raise UsageError(
                f"compile_mode {self.compile_mode} needs updates of one batch per process, because each replay "
                f"of a CUDA graph overwrites the gradients of the last one, got {self.grad_accum_steps}"
            )

    def _check_pairs(self) -> None:
        """Raise UsageError for options that exclude each other, and for an option without one that it needs."""
        for name, rules in self.rules().items():
            value = getattr(self, name)
            if value == rules.default:
                continue
            if rules.not_with and getattr(self, rules.not_with):
                raise UsageError(f"{name} excludes {rules.not_with}, got {value} beside it")
            if rules.goes_with and not getattr(self, rules.goes_with):
                raise UsageError(f"{name} needs {rules.goes_with}, got {value} without it")

    def _take_statistics(self) -> None:
        """Give mean and std a number for each channel if they have one for all; raise UsageError unless they are empty,
        or one or three numbers each."""
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if numbers:
                setattr(self, name, list(channel_statistics(name, numbers)))

    @classmethod
    def rules(cls) -> dict[str, SimpleNamespace]:
        """Return the rules of every option, by its name."""
        return {field.name: field.metadata["rules"] for field in dataclasses.fields(cls)}

    def warmup_updates(self, updates_per_epoch: int) -> int:
        """Return the updates of the warm-up."""
        if not isinstance(self.warmup_epochs, str):
            return round(self.warmup_epochs * updates_per_epoch)
        share = float(self.warmup_epochs.removesuffix("%")) / 100
        return round(share * round(self.epochs * updates_per_epoch))

    @property
    def cuda_graphs(self) -> bool:
        """Whether the compiled model is replayed as CUDA graphs, if the device is CUDA."""
        return self.compile and self.compile_mode in CUDA_GRAPHS

    def for_processes(self, processes: int) -> "TrainConfig":
        """Return these options with the batch_size and grad_accum_steps that make `total_batch` on so many processes.

        A process adds up the fewest equal batches of at most `batch_size` images. Without `total_batch` the options
        are returned unchanged.

        Raises:
            UsageError: the processes cannot share `total_batch` equally; names the nearest numbers that they can.
        """
        total = self.total_batch
        if not total:
            return self
        pair = 2 if self.mixes else 1
        group = processes * pair
        if total % group:
            below = total - total % group
            nearest = f"{below} or {below + group}" if below else str(group)
            in_pairs = " in pairs, which mixup and cutmix need" if self.mixes else ""
            raise UsageError(
                f"total_batch {total} cannot be shared by {processes} processes{in_pairs}: "
                f"{nearest} can"
            )
        images = total // processes  # of each process
        count = 1
        while images % (count * pair) or images // count > self.batch_size:
            count += 1
        shared = dataclasses.replace(self, grad_accum_steps=count, batch_size=images // count)
        shared.optional_kwargs = self.optional_kwargs
        return shared

    def images_of_update(self, processes: int) -> int:
        """Return the images of an update on so many processes; for options with `total_batch` see `for_processes`."""
        return self.batch_size * self.grad_accum_steps * processes

    def peak_lr(self, images: int) -> float:
        """Return the peak learning rate of updates of so many images."""
        if not self.lr_base_size:
            return self.lr
        scale = self.lr_base_scale
        if scale == "auto":
            adaptive = any(part in self.opt.lower() for part in ("ada", "lamb"))
            scale = "sqrt" if adaptive else "linear"
        ratio = images / self.lr_base_size
        return self.lr * (ratio**0.5 if scale == "sqrt" else ratio)

    def differences(
        self, saved: dict, processes: int = 1, saved_processes: int = 1
    ) -> dict[str, str]:
        """Return, by name, a message for each option that differs from the saved one and may not change on resume.

        An option missing from `saved` is newer than the run, which was made with its default. How processes share
        the images of an update may change; the number of images (total_batch) may not.
        """
        options = self.rules()
        changed = {}
        for name in saved.keys() - options:
            changed[name] = f"{name} was {saved[name]!r}, an option that is gone"
        for name, rules in options.items():
            was = saved.get(name, rules.default)
            now = getattr(self, name)
            if was != now and not rules.resume:
                changed[name] = f"{name} was {was!r}, got {now!r}"
        was = saved["batch_size"] * saved["grad_accum_steps"] * saved_processes
        now = self.images_of_update(processes)
        if was != now:
            changed["total_batch"] = (
                "the images of an update (batch_size x grad_accum_steps x processes) were "
                f"{was}, got {now}"
            )
        return changed


@dataclass
class StreamConfig(TrainConfig):
    """The options of trainers whose images are decoded as they are needed."""

    workers: int = setting(
        -1,
        "processes (threads for FFCV) that decode images, per training process; 0: in this one; -1: one "
        "per CPU, up to 8, and where processes are spawned (macOS, Windows) one per 1,000 images",
        minimum=-1,
        maximum=MOST_WORKERS,
    )

    hflip: float = option(0.5, "probability of a left-right flip", "augmentation", maximum=1.0)

    max_bad_images: int = setting(10, "the run stops when more images cannot be read", "data")


def _whole(value: Any) -> int:
    """Return a whole number; 1e3 and 10.0 are whole, too."""
    number = float(value)
    if number % 1:
        raise ValueError
    return int(number)


def _percentage(value: Any) -> float | str:
    """Return a number, or a percentage as text."""
    if not str(value).endswith("%"):
        return float(value)
    if not 0 <= float(value[:-1]) <= 100:
        raise ValueError
    return value


def _numbers(value: Any) -> list[float]:
    """Return a list of numbers. A text is refused: its digits are no list."""
    if isinstance(value, (str, dict)):
        raise TypeError
    return [] if value is None else [float(number) for number in value]


def _plain(value: Any) -> Any:
    """Return `value` if checkpoints and YAML can hold it, else raise TypeError or ValueError."""
    return json.loads(json.dumps(value))


def _key_value(word: str) -> tuple[str, Any]:
    """Return a key and its value, read as YAML (0.5, true, [1, 2], text)."""
    key, equals, value = word.partition("=")
    try:
        if not equals or not key:
            raise ValueError
        return key, _plain(yaml.safe_load(value))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"key=value required, with a number, true, false, text or a [list], got {word[:80]!r}"
        ) from error


# How a value of each type is read, and its flag on the command line.
KINDS = {
    int: (_whole, {"metavar": "N"}),
    float: (float, {"metavar": "X"}),
    float | str: (_percentage, {"metavar": "X|P%"}),
    bool: (bool, {"action": argparse.BooleanOptionalAction}),
    dict: (
        lambda value: _plain(dict(value or {})),
        {"nargs": "+", "action": "extend", "type": _key_value, "metavar": "KEY=VALUE"},
    ),
    list[float]: (_numbers, {"nargs": "*", "metavar": "X"}),
    str: (lambda value: "none" if value is None else str(value), {}),
}


def _checked(name: str, value: Any, kind: Any, rules: SimpleNamespace) -> Any:
    """Return `value` as `kind`. YAML reads 1e-4 as text and 1 as an integer; both are accepted as floats. A key without
    a value (None) is empty, if that is the option's default.

    Raises:
        UsageError: `value` has another type, or `rules` do not allow it or one of its elements.
    """
    read, _ = KINDS[kind]
    if value is None and rules.default == "":
        return ""
    requirement = f"of type {getattr(kind, '__name__', kind)}"
    if kind == float | str:
        requirement = "a number, or a percentage up to 100%"
    if rules.choices:
        requirement = f"one of {', '.join(rules.choices)}"
    try:
        if isinstance(value, bool) != (kind is bool):  # YAML reads off as false
            raise TypeError
        value = read(value)
        if rules.choices and value not in rules.choices:
            raise ValueError
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"{name} must be {requirement}, got {value!r}") from error
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, (int, float)):
            _check_number(name, number, rules)
    return value


def _check_number(name: str, number: float, rules: SimpleNamespace) -> None:
    """Raise UsageError for a number that the rules do not allow."""
    requirement = ""
    if not math.isfinite(number):
        requirement = "a finite number"
    elif number < rules.minimum:
        requirement = f"at least {rules.minimum}"
    elif number > rules.maximum:
        requirement = f"at most {rules.maximum}"
    elif number <= rules.above:
        requirement = f"above {rules.above}"
    if requirement:
        raise UsageError(f"{name} must be {requirement}, got {number}")


# ---- recipes ----------------------------------------------------------------------------------------------------

RECIPES = resources.files("ea_vision.recipes")
# The networks of the papers' ImageNet tables, each with the base of its recipe imagenet_MODEL.
RESNETS = (
    "resnet34 resnet50 resnet101 resnet152 aa_resnet34 aa_resnet50 aa_resnet101 aa_resnet152 "
    "pa_aa_resnet34 pa_aa_resnet50 pa_aa_resnet101 "
    "ea_aa_resnet34 ea_aa_resnet50 ea_aa_resnet101 ea_aa_resnet152"
)
MNASNETS = "semnasnet_075 semnasnet_100 semnasnet_125 semnasnet_140"
AA_MNASNETS = "aa_mnasnet_075 aa_mnasnet_100 aa_mnasnet_125 aa_mnasnet_140"
PUBLISHED = {
    **dict.fromkeys(RESNETS.split(), "imagenet"),
    **dict.fromkeys(MNASNETS.split(), "imagenet_semnasnet_100"),
    **dict.fromkeys(AA_MNASNETS.split(), "imagenet_aa_mnasnet_100"),
}


def recipe_names() -> list[str]:
    """Return the names of the recipes: the files of the package, and imagenet_MODEL for each published network."""
    names = {f"imagenet_{model}" for model in PUBLISHED}
    for file in RECIPES.iterdir():
        if file.name.endswith(".yaml"):
            names.add(file.name.removesuffix(".yaml"))
    return sorted(names)


def lay_over(options: dict, above: dict) -> None:
    """Update options by those `above` them. model_kwargs are merged key by key; so are opt_kwargs, unless the optimiser
    changes."""
    if above.get("opt", options.get("opt")) != options.get("opt"):
        options["opt_kwargs"] = {}
    merged = {}
    for key in ("model_kwargs", "opt_kwargs"):
        merged[key] = {**(options.get(key) or {}), **(above.get(key) or {})}
    options.update(above, **merged)


def load_recipe(name: str) -> dict:
    """Read a recipe by name or path, laid over its `base` if it names one. A run folder's config.yaml is a recipe, too.

    Raises:
        UsageError: no such recipe, not a YAML mapping, or a recipe that is its own base.
    """
    chain = {}
    while name != "none":
        if name in chain:
            raise UsageError(f"recipe {name} is its own base: {' -> '.join([*chain, name])}")
        chain[name] = _read_recipe(name)
        name = chain[name].pop("base", "none")
    recipe = {}
    for above in reversed(chain.values()):
        lay_over(recipe, above)
    return recipe


MERGE = "tag:yaml.org,2002:merge"  # of <<, which lays another mapping under its own


class _RecipeLoader(yaml.SafeLoader):
    """YAML's loader, which refuses a key that stands twice in a mapping; YAML's own keeps the last."""

    def construct_mapping(self, node, deep=False):
        if isinstance(node, yaml.MappingNode):
            keys = [(key.tag, str(key.value)) for key, _ in node.value]
            for tag, key in keys:
                if tag != MERGE and keys.count((tag, key)) > 1:
                    raise yaml.YAMLError(f"{key} stands twice")
        return super().construct_mapping(node, deep)


def _read_recipe(name: str) -> dict:
    """Return the entries of one recipe, with the name of its `base`."""
    path = Path(name)
    if name in recipe_names():
        path = RECIPES / f"{name}.yaml"
        model = name.removeprefix("imagenet_")
        if not path.is_file():
            return {"base": PUBLISHED[model], "model": model, "num_classes": 1000}
    elif not path.is_file():
        near = near_matches(name, [*recipe_names(), "none"], "recipes")
        raise UsageError(f"no recipe {name!r}: {near}")
    problem = f"recipe {name} cannot be read, or is not valid YAML"
    with as_usage_error(problem, (OSError, ValueError, RecursionError, yaml.YAMLError)):
        recipe = yaml.load(path.read_text(encoding="utf-8"), _RecipeLoader)
    if not isinstance(recipe, dict):
        raise UsageError(f"recipe {name} must be a YAML mapping, got {type(recipe).__name__}")
    if not isinstance(recipe.get("base", "none"), str):
        raise UsageError(f"recipe {name}: base must be a recipe, got {recipe['base']!r}")
    for key in ("model_kwargs", "opt_kwargs"):
        if not isinstance(recipe.get(key) or {}, dict):
            raise UsageError(f"recipe {name}: {key} must be a mapping, got {recipe[key]!r}")
    return recipe


def trainer_of(options: Collection[str]) -> str:
    """Return the trainer that has these options, or entries of notes; "" if it is none of ours."""
    return next((trainer for name, trainer in TRAINERS.items() if name in options), "")


def resolve(cls: type[TrainConfig], given: dict) -> Any:
    """Build the config: defaults < recipe < `given` (the command line). Its `optional_kwargs` name the model keywords
    that only the recipe sets: they are dropped for a model that lacks them.

    Raises:
        UsageError: unknown key (naming near matches), wrong type or range.
    """
    names = cls.rules()
    recipe_name = given.get("recipe", names["recipe"].default)
    options = load_recipe(recipe_name)
    if "about" in options:  # the config.yaml of a run, perhaps another trainer's
        not_inherited = {"output", "resume"}
        if trainer_of(options) != trainer_of(names):
            not_inherited.add("dataset")  # trainers read different ones
        for key in options.keys() - names.keys() | not_inherited:
            options.pop(key, None)
    for key in options:
        if key not in names:
            flag = f"--{key}".replace("_", "-")
            meant = OTHERS.get(flag, flag).removeprefix("--").replace("-", "_")
            near = near_matches(meant, names, "options")
            raise UsageError(f"recipe {recipe_name}: unknown option {key!r}; {near}")
    optional = set(options.get("model_kwargs", ())) - set(given.get("model_kwargs", ()))
    if "batch_size" in given or "grad_accum_steps" in given:
        options["total_batch"] = 0
    lay_over(options, {**given, "recipe": recipe_name})
    config = cls(**options)
    config.optional_kwargs = frozenset(optional)
    return config


# ---- the command line -------------------------------------------------------------------------------------------


# The options that --help lists: the first ten of these that a trainer has.
USED_FIRST = (
    "model",
    "dataset",
    "data_dir",
    "recipe",
    "output",
    "device",
    "epochs",
    "batch_size",
    "lr",
    "amp",
    "pretrained",
)


# Names that other trainers have for our flags.
OTHERS = {
    "--learning-rate": "--lr",
    "--optimizer": "--opt",
    "--scheduler": "--sched",
    "--gpu": "--device",
    "--wd": "--weight-decay",
    "--bs": "--batch-size",
}


class _Parser(CommandParser):
    """A parser of a trainer's options, with one-line errors."""

    def meant(self, word: str) -> str:
        flag = word.partition("=")[0]
        if flag in OTHERS:
            return f"did you mean {OTHERS[flag]}?"
        if not word.startswith("-") and Path(word).exists():
            return f"did you mean --data-dir {word}?"
        return super().meant(word)

    def error(self, message: str):
        raise UsageError(f"{message} (see {self.prog} --help-all)")


def make_parser(
    cls: type[TrainConfig], description: str, examples: str, every: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with one flag for each field of `cls`; shown defaults are those of the default recipe.

    --help lists the options that are used first or, with `every`, all options by their groups, as for --help-all.
    """
    parser = _Parser(
        usage="%(prog)s [OPTION ...]",
        description=description,
        epilog="examples:\n" + examples,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=26, width=100
        ),
    )
    parser.add_argument("--help-all", action="help", help="list all options and end")
    defaults = resolve(cls, {})
    hints = typing.get_type_hints(cls)
    shown_first = [name for name in USED_FIRST if name in cls.rules()][:10]
    groups = {title: parser.add_argument_group(title) for title in ("used first", *GROUPS)}
    title = ""
    for name, rules in cls.rules().items():
        shown = getattr(defaults, name)
        if isinstance(shown, dict):
            shown = " ".join(f"{key}={value}" for key, value in shown.items())
        if shown in ("", []):
            shown = "empty"
        help = f"{rules.help} (default: {shown})".replace("%", "%%")
        _, words = KINDS[hints[name]]
        words = words or {"metavar": "|".join(rules.choices) or name.upper()}
        if rules.bare:
            words = {**words, "nargs": "?", "const": rules.bare}
        first = name in shown_first
        title = rules.group or title
        group = groups["used first" if first else title]
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, help=help if first or every else argparse.SUPPRESS, **words)
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> dict:
    """Return the options that the command line gives, and only those.

    Raises:
        UsageError: unknown flag (naming near matches), an argument that is not an option, or a missing value.
    """
    options = vars(parser.parse_args(argv))
    for key, value in options.items():
        if key.endswith("_kwargs"):
            options[key] = dict(value)
    return options

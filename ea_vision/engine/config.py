"""Options of a training run: a dataclass, filled from its defaults, then a recipe file, then the command line.

Every field becomes a flag and a recipe key of the same name. An unknown key is an error that names its near matches.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import typing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.processes import MOST_WORKERS
from ea_vision.engine.gates import check_gate_ramp
from ea_vision.engine.logit_scale import check_logit_scale
from ea_vision.engine.views import VIEWS


def option(default: Any, help: str, *, choices=None, minimum=None, maximum=None, above=None, below=None,
           free: bool = False, not_with: str = "", bare: Any = None):
    """A field of an options dataclass.

    Args:
        help: for --help; states the unit.
        choices, minimum, maximum, above, below: the values it allows; the last two are not allowed themselves.
        free: not part of the experiment, so it may differ between the run that wrote a checkpoint and the one that
            continues it.
        not_with: an option that excludes this one: while that has a value, this must keep its default.
        bare: the value of the flag without a value.
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "above": above,
                "below": below, "free": free, "not_with": not_with, "bare": bare}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


@dataclass
class TrainConfig:
    """What every trainer needs; a trainer adds the fields of its data set in a subclass."""

    model: str = option("ea_conv_transformer_cifar", "registered timm model, ours or timm's")
    model_kwargs: dict = option({}, "further keywords of the model, as key=value ...")
    pretrained: bool = option(False, "begin with timm's weights of the model; their classifier goes where the data has "
                                     "another number of classes")
    pretrained_path: str = option("", "begin with the weights of a file or run folder instead: the model's own, or "
                                      "those of the plain transformer for one whose maps evolve", free=True)
    recipe: str = option("fast", "recipe: a name in ea_vision/recipes, a YAML file, or none", free=True)
    data_dir: str = option("", "folder of the data set; empty: the cache folder's", free=True)
    cache_dir: str = option("", "where decoded images are kept; empty: $XDG_CACHE_HOME/ea_vision; none: keep nothing",
                            free=True)
    output: str = option("", "run folder; empty: runs/DATASET-MODEL", free=True)
    resume: str = option("auto", "auto: continue from the newest valid checkpoint of --output, or begin; "
                                 "none: begin; PATH: continue from this checkpoint or run folder", free=True)
    seed: int = option(0, "seed of weights, order, augmentation and held-out images", minimum=0,
                       maximum=2**63 - 1)
    workers: int = option(2, "threads that decode images; 0: in this process", minimum=0, maximum=MOST_WORKERS,
                          free=True)
    device: str = option("auto", "where to compute; auto: cuda if there is one", choices=("auto", "cpu", "cuda"),
                         free=True)

    epochs: float = option(10, "passes over the training images; of 4.3 the last one ends after 0.3 of its updates",
                           above=0, free=True)
    batch_size: int = option(128, "images per process and step", minimum=1)
    grad_accum: int = option(1, "batches added up for one update of the weights", minimum=1)
    opt: str = option("sgd", "timm optimiser, lookahead_NAME too (sgd is Nesterov's, momentum the plain one; muon: "
                             "AdamW for what is no matrix)")
    opt_kwargs: dict = option({}, "further keywords of the optimiser, as key=value ..., such as muon's "
                                  "fallback_lr_scale=0.5 (rate of its AdamW, times lr)")
    lr: float = option(0.2, "peak learning rate, per update", minimum=0.0)
    gate_lr: float = option(1.0, "learning rate of learnable shares (a model's alpha and beta) over that of the rest",
                            minimum=0.0)
    gate_ramp: dict = option({}, "values to which learnable shares are raised linearly, from where the model has them, "
                                 "and kept at: alpha=0.5 beta=1.0; empty: they learn")
    gate_ramp_share: float = option(0.5, "share of all updates over which gate_ramp raises them", minimum=0.0,
                                    maximum=1.0)
    layer_decay: float = option(1.0, "rate of a layer over that of the one above it (timm's layer-wise decay, 0.65 to "
                                     "0.9 in fine-tuning); 1: one rate", above=0.0, maximum=1.0)
    lr_base_batch: int = option(0, "if not 0, lr is per this many images and scaled to those of an update", minimum=0)
    momentum: float = option(0.9, "momentum of the optimiser", minimum=0.0, maximum=1.0)
    weight_decay: float = option(5e-4, "weight decay (not of norms, biases and position tables)", minimum=0.0)
    norm_bias_lr: float = option(1.0, "rate of the norms' biases, times lr", minimum=0.0)
    attention_lr: float = option(1.0, "rate of queries, keys, values, position tables and map convolutions, times lr",
                                 minimum=0.0)
    clip_grad: float = option(0.0, "largest norm of the gradient; 0: no limit", minimum=0.0)
    schedule: str = option("one_cycle", "learning rate over time; one_cycle: line up, line down; cosine: warm-up, "
                                        "then cosine cycles; step: warm-up, then factors at decay_epochs; exp: "
                                        "warm-up, then a factor every decay_every epochs",
                           choices=("one_cycle", "cosine", "step", "exp", "constant"))
    warmup: float = option(0.2, "share of all updates that is linear warm-up from 0", minimum=0.0, maximum=1.0)
    lr_min: float = option(0.0, "lowest learning rate", minimum=0.0)
    cycle_epochs: float = option(0.0, "cosine: epochs of the first cycle; 0: one cycle for all", minimum=0.0)
    cycle_mul: float = option(1.0, "cosine: each cycle is this many times longer than the one before", minimum=1.0)
    decay_epochs: list[float] = option([], "step: epochs at which the rate is multiplied by decay_rate")
    decay_every: float = option(0.0, "exp: epochs, or a fraction of one, after which the rate is multiplied by "
                                     "decay_rate", minimum=0.0)
    decay_rate: float = option(0.1, "step, exp: the factor", minimum=0.0, maximum=1.0)

    whiten: bool = option(False, "give the first convolution frozen filters, which whiten the patches of the training "
                                 "images")
    logit_scale: float = option(1.0, "power of two by which the loss sees the logits multiplied; exported weights have "
                                     "it multiplied in", minimum=0.0)
    label_smoothing: float = option(0.1, "share of the target spread over all classes", minimum=0.0, maximum=1.0)
    bce_loss: bool = option(False, "binary cross-entropy, a yes or no for each class, in place of softmax and "
                                   "cross-entropy")
    bce_target_thresh: float = option(0.0, "bce_loss: targets above this share become 1, the others 0; 0: as they are",
                                      minimum=0.0, below=1.0)
    mixup: float = option(0.0, "alpha of mixup; 0: off", minimum=0.0)
    cutmix: float = option(0.0, "alpha of cutmix; 0: off", minimum=0.0)
    random_erasing: float = option(0.0, "probability that an image has a rectangle replaced by noise",
                                   minimum=0.0, maximum=1.0)
    ema: float = option(0.0, "decay, per update, of the averaged weights that are evaluated and exported; 0: off",
                        minimum=0.0, below=1.0)
    ema_warmup: bool = option(True, "let the decay of the average grow from 0 at the start")

    amp: str = option("none", "precision of the forward pass; --amp alone: bfloat16",
                      choices=("none", "bfloat16", "float16"), bare="bfloat16")
    channels_last: bool = option(False, "keep images and weights channels-last in memory", free=True)
    compile: bool = option(False, "compile the model with torch.compile", free=True)
    compile_mode: str = option("default", "mode of torch.compile; reduce-overhead: CUDA graphs, for networks whose "
                                          "kernels are short, such as those of CIFAR", choices=COMPILE_MODES, free=True)
    sync_bn: bool = option(False, "batch statistics over all processes (CUDA only)")
    eval_batch_size: int = option(500, "images per process and evaluation step", minimum=1)
    eval_epochs: int = option(1, "epochs between evaluations; the last epoch is always evaluated", minimum=1,
                              free=True)
    checkpoint_steps: int = option(0, "updates between checkpoints inside an epoch; 0: at its end only", minimum=0,
                                   free=True)
    snapshot_epochs: int = option(0, "keep the weights of every so many epochs in RUN/snapshots; 0: none", minimum=0,
                                  free=True)
    tta: str = option("none", "views whose logits are averaged, in a finished run's test and in --evaluate, beside the "
                              "plain figure; six: mirrored and shifted by a pixel", choices=VIEWS, free=True)
    test: bool = option(True, "test a finished run on the test images; --no-test, with images held out: leave "
                              "them alone", free=True)
    on_nan: str = option("stop", "on a non-finite loss or gradient; rollback: continue from the last checkpoint, the "
                                 "learning rate halved (at most 5 times); skip: leave the update out (at most 20 "
                                 "times)", choices=("stop", "rollback", "skip"), free=True)
    log_steps: int = option(0, "updates between rows of speed.csv; 0: none", minimum=0, free=True)
    tensorboard: bool = option(False, "write TensorBoard events into the run folder", free=True)
    eval_on_train: bool = option(False, "allow data whose training images are those to evaluate on; what comes out is "
                                        "no accuracy, and nothing calls it one", free=True)
    wandb: str = option("", "Weights & Biases project; empty: none", free=True)
    log_maps: int = option(0, "epochs between pictures of the attention maps of the first images that are evaluated "
                              "on, in RUN/maps and on the boards; 0: none", minimum=0, free=True)

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _coerce(field.name, getattr(self, field.name), hints[field.name])
            _check_range(field, value)
            setattr(self, field.name, value)
        if self.epochs == int(self.epochs):
            self.epochs = int(self.epochs)
        self._check_exclusions()
        if self.lr_min > self.lr:
            raise UsageError(f"lr_min must be at most lr ({self.lr:g}), got {self.lr_min:g}")
        if self.cycle_epochs and self.warmup:
            raise UsageError(f"cosine restarts have no warm-up: warmup must be 0 when cycle_epochs is "
                             f"{self.cycle_epochs:g}, got {self.warmup:g}")
        if (self.mixup or self.cutmix) and self.batch_size < 2:
            raise UsageError(f"mixup and cutmix mix pairs of images: batch_size must be at least 2, got "
                             f"{self.batch_size}")
        if self.compile_mode != "default" and not self.compile:
            raise UsageError(f"compile_mode goes with compile, got {self.compile_mode} without it")
        if self.cuda_graphs and self.grad_accum > 1:
            raise UsageError(f"compile_mode {self.compile_mode} needs grad_accum 1, for the next replay of a CUDA "
                             f"graph takes the gradients of the one before, got {self.grad_accum}")
        if self.bce_target_thresh and not self.bce_loss:
            raise UsageError(f"bce_target_thresh goes with bce_loss, got {self.bce_target_thresh:g} without it")
        if self.bce_loss and self.label_smoothing == 1:
            raise UsageError("label_smoothing must be below 1 with bce_loss, got 1")
        if self.schedule == "exp" and not self.decay_every:
            raise UsageError("schedule exp needs decay_every above 0, got 0")
        if self.decay_epochs != sorted(self.decay_epochs):
            raise UsageError(f"decay_epochs must rise, got {self.decay_epochs}")
        check_logit_scale(self.logit_scale)
        check_gate_ramp(self.gate_ramp)

    @property
    def cuda_graphs(self) -> bool:
        """Whether the compiled model is replayed as CUDA graphs, where there is CUDA."""
        return self.compile and self.compile_mode in CUDA_GRAPHS

    @property
    def logs_steps(self) -> bool:
        """Whether the run keeps a step log."""
        return bool(self.log_steps or self.tensorboard or self.wandb)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """The options that a run may not change on its way, where they differ from the saved ones, as text.

        An option that is missing there is younger than what was saved, which was made with its default.
        """
        default = {f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
                   for f in dataclasses.fields(self)}
        own = self.as_dict()
        return [f"{f.name} was {saved.get(f.name, default[f.name])!r}, got {own[f.name]!r}"
                for f in dataclasses.fields(self)
                if not f.metadata["free"] and saved.get(f.name, default[f.name]) != own[f.name]]

    def _check_exclusions(self) -> None:
        """Raise UsageError where an option with `not_with` has a value beside the one that excludes it."""
        fields = [f for f in dataclasses.fields(self) if f.metadata["not_with"]]
        for other in dict.fromkeys(f.metadata["not_with"] for f in fields):
            excluded = [f for f in fields if f.metadata["not_with"] == other]
            if getattr(self, other) and any(getattr(self, f.name) != f.default for f in excluded):
                names, required, given = (" and ".join(words) for words in zip(*(
                    (f.name, "empty" if f.default == "" else f"{f.default:g}", repr(getattr(self, f.name)))
                    for f in excluded), strict=True))
                raise UsageError(f"{names} must be {required} with --{other.replace('_', '-')}, got {given}")


def _coerce(name: str, value: Any, kind: Any) -> Any:
    """Return `value` as `kind`. YAML reads 1e-4 as text, and 1 for a float as an integer: both are taken as meant."""
    try:
        if kind is bool:
            if not isinstance(value, bool):
                raise ValueError
            return value
        if kind is int:
            if isinstance(value, bool):
                raise ValueError
            try:
                return int(str(value))
            except ValueError:  # 1e3 and 10.0 are whole numbers, too
                if float(value) != int(float(value)):
                    raise
                return int(float(value))
        if kind is float:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        if kind is str:
            return "none" if value is None else str(value)
        if kind is dict:
            return _plain(dict(value or {}))
        return [float(v) for v in value or []]
    except (TypeError, ValueError, OverflowError):
        wanted = getattr(kind, "__name__", str(kind))
        raise UsageError(f"{name} must be of type {wanted}, got {value!r}") from None


def _plain(value: Any) -> Any:
    """Return `value` where it is what checkpoints and YAML can hold, else raise ValueError."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError


def _check_range(field: dataclasses.Field, value: Any) -> None:
    choices, low, high, above, below = (
        field.metadata[k] for k in ("choices", "minimum", "maximum", "above", "below"))
    if choices is not None and value not in choices:
        raise UsageError(f"{field.name} must be one of {', '.join(choices)}, got {value!r}")
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise UsageError(f"{field.name} must be a {'number' if math.isnan(number) else 'finite number'}, "
                             f"got {number}")
    if low is not None and value < low:
        raise UsageError(f"{field.name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise UsageError(f"{field.name} must be at most {high}, got {value}")
    if above is not None and value <= above:
        raise UsageError(f"{field.name} must be above {above}, got {value}")
    if below is not None and value >= below:
        raise UsageError(f"{field.name} must be below {below}, got {value}")


def recipe_names() -> list[str]:
    """Names of the recipes the package ships."""
    return sorted(f.name.removesuffix(".yaml") for f in resources.files("ea_vision.recipes").iterdir()
                  if f.name.endswith(".yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """Read a recipe by name or path, over the one that it names as its `base`. A run folder's config.yaml is one too.

    Raises:
        UsageError: no such recipe, not a YAML mapping, or a recipe that is its own base.
    """
    recipe, chain = {}, []
    while name != "none":
        if name in chain:
            raise UsageError(f"recipe {name} is its own base: {' -> '.join([*chain, name])}")
        chain.append(name)
        own = _read_recipe(name)
        kwargs = {**(own.get("model_kwargs") or {}), **recipe.get("model_kwargs", {})}
        name = own.pop("base", "none")
        if "opt" in recipe:  # another optimiser's keywords
            own.pop("opt_kwargs", None)
        recipe = {**own, **recipe, **({"model_kwargs": kwargs} if kwargs else {})}
    return recipe


def describe_recipe(name: str) -> str:
    """A recipe's name and the first sentence of its comment, for a log."""
    if name == "none":
        return "none (the options' own defaults)"
    if name not in recipe_names():
        return name
    comment = ""
    for line in (resources.files("ea_vision.recipes") / f"{name}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        comment += " " + line.lstrip("# ")
    sentence = re.split(r"(?<!et al)\. ", comment.strip() + " ")[0].rstrip(". ")
    return f"{name} ({sentence})" if sentence else name


def _read_recipe(name: str) -> dict[str, Any]:
    """What one recipe file says, `base` included."""
    if name in recipe_names():
        text = (resources.files("ea_vision.recipes") / f"{name}.yaml").read_text()
    else:
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"no recipe {name!r}: {near_matches(name, recipe_names() + ['none'], 'recipes')}")
        try:
            text = path.read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"recipe {name} cannot be read: {error}") from error
    try:
        recipe = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"recipe {name} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise UsageError(f"recipe {name} must be a YAML mapping, got {type(recipe).__name__}")
    if "run" in recipe:  # a run folder's: its place on disk is not part of the experiment
        recipe = {key: value for key, value in recipe.items() if key not in ("run", "output", "resume")}
    return recipe


def resolve(cls: type[TrainConfig], given: dict[str, Any]) -> tuple[Any, frozenset[str]]:
    """Build the config: defaults < recipe < `given` (the command line). Model keywords are merged key by key.

    Returns:
        The config, and the model keywords that only the recipe asks for: a model that lacks them goes without.

    Raises:
        UsageError: unknown key (naming near matches), wrong type or range.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    recipe_name = given.get("recipe", cls.recipe)
    recipe = load_recipe(recipe_name)
    for source, keys in (("recipe " + recipe_name, recipe), ("command line", given)):
        for key in keys:
            if key not in names:
                raise UsageError(f"{source}: unknown option {key!r}; {near_matches(key, names, 'options')}")
    opt_kwargs = given.get("opt_kwargs") or {}
    if given.get("opt", recipe.get("opt")) == recipe.get("opt"):  # the recipe's are for the recipe's optimiser
        opt_kwargs = {**(recipe.get("opt_kwargs") or {}), **opt_kwargs}
    recipe_kwargs, given_kwargs = recipe.get("model_kwargs") or {}, given.get("model_kwargs") or {}
    values = {**recipe, **given, "recipe": recipe_name, "opt_kwargs": opt_kwargs,
              "model_kwargs": {**recipe_kwargs, **given_kwargs}}
    return cls(**values), frozenset(recipe_kwargs) - frozenset(given_kwargs)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name near matches."""

    def error(self, message: str):
        raise UsageError(f"{message} (see {self.prog} --help)")


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog):
        super().__init__(prog, max_help_position=30, width=120)


class _KeyValues(argparse.Action):
    """Collect key=value words into a dict; values are read as YAML (0.5, true, [1, 2], text)."""

    def __call__(self, parser, namespace, values, option_string=None):
        result = dict(getattr(namespace, self.dest, None) or {})
        for word in values:
            key, equals, value = word.partition("=")
            if not equals or not key:
                parser.error(f"{option_string} takes key=value, got {word!r}")
            try:
                result[key] = _plain(yaml.safe_load(value))
            except (yaml.YAMLError, ValueError, RecursionError):
                parser.error(f"{option_string} takes key=value with a number, true, false, text or a [list], "
                             f"got {word[:80]!r}")
        setattr(namespace, self.dest, result)


def make_parser(cls: type[TrainConfig], description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with one flag for each field of `cls`; shown defaults are those of the default recipe."""
    parser = _Parser(description=description, epilog="examples:\n" + examples, allow_abbrev=False,
                     formatter_class=_Help, argument_default=argparse.SUPPRESS)
    defaults, _ = resolve(cls, {})
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flag = "--" + field.name.replace("_", "-")
        shown = getattr(defaults, field.name)
        if isinstance(shown, dict):
            shown = " ".join(f"{k}={v}" for k, v in shown.items())
        help = f"{field.metadata['help']} (default: {shown if shown not in ('', []) else 'empty'})".replace("%", "%%")
        kind = hints[field.name]
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)
        elif kind is dict:
            parser.add_argument(flag, nargs="+", action=_KeyValues, metavar="KEY=VALUE", help=help)
        elif kind in (str, int, float):
            metavar = "|".join(field.metadata["choices"]) if field.metadata["choices"] else field.name.upper()
            bare = field.metadata["bare"]
            parser.add_argument(flag, metavar=metavar, help=help, **({"nargs": "?", "const": bare} if bare else {}))
        else:
            parser.add_argument(flag, nargs="*", metavar="EPOCH", help=help)
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> dict[str, Any]:
    """Return the options that the command line gives, and only those.

    Raises:
        UsageError: unknown flag (naming near matches) or missing value.
    """
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [s for action in parser._actions for s in action.option_strings if s.startswith("--")]
        word = unknown[0].partition("=")[0]
        raise UsageError(f"unknown argument {unknown[0]!r}; {near_matches(word, flags, 'flags')}")
    return vars(namespace)

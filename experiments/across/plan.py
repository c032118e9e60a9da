"""The parts of the verdict as fixed in README.md of this folder; run, benchmark, power and analyse import them."""

import csv
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "across"
VIT, RIVAL, NARROW = "small ViT", "small ViT, token_conv", "narrow Conv-Transformer"
ONE = "small ViT, one convolution"
LONGER, EVEN = (
    "token_conv longer",
    "token_conv same operations",
)  # trained as long as conv2d, in time and in multiply-adds
EPOCHS = {
    LONGER: 11.92,
    EVEN: 10.02,
}  # instead of 8; 11.92 is 8r in README.md, fixed before the runs
UNFUSED = (
    "plain",
    "xsa",
    "gated",
)  # kinds that use timm's attention, whose fused form is slow in bfloat16
_ALL = "--eval-epochs 100 --amp bfloat16 --channels-last --workers 0 --device cpu --test".split()
_VIT = (
    "--recipe none --opt adamw --lr 2e-3 --sched linear --weight-decay 0.05 --smoothing 0.1 --clip-grad 1 "
    "--epochs 8 --batch-size 128 --cutout 0 --holdout 30000"
).split()
_NARROW = "--recipe fast --epochs 4 --holdout 5000".split()


@dataclass(frozen=True)
class Network:
    """A network without mechanism, its keywords, its data set, its training options, and the module whose commands
    know it."""

    model: str
    keywords: Mapping[str, Any]
    data: str
    classes: int
    options: Sequence[str]
    module: str = "ea_vision"


NETWORKS = {
    VIT: Network("vit_mini_patch4_32", {}, "cifar10", 10, _VIT),
    RIVAL: Network("vit_mini_patch4_32", {"token_conv": "paper"}, "cifar10", 10, _VIT),
    ONE: Network(
        "vit_mini_one_conv", {}, "cifar10", 10, _VIT, module="experiments.across.one_convolution"
    ),
    NARROW: Network(
        "conv_transformer_cifar", {"widths": [16, 32, 64, 64]}, "cifar100", 100, _NARROW
    ),
}


def mechanism(network: str, variant: str) -> dict[str, Any]:
    """Return the keywords that give the network a variant's mechanism, beginning with the identity."""
    kind = variant.partition(" ")[0]
    if variant == ZERO_TOKEN_CONV:
        return {"token_conv": True}
    if kind == "token_conv":
        return {"token_conv": "paper"}
    return {
        "evolution": kind,
        **({"start": "identity"} if network == NARROW and kind != "uniform" else {}),
    }


@dataclass(frozen=True)
class Part:
    """A sweep of the verdict: its variants over its seeds, each compared with the baseline.

    tested: the variants that are hypotheses, corrected together (Holm). described: variants without a test.
    network: a key of NETWORKS and its name in the file of times.
    beside: other parts to which the runs of some of the variants belong.
    times: the file of the steps' times, measured on the machine of the runs.
    hypotheses: the number of tests that p is corrected for; 0: the tested variants alone.
    """

    name: str
    title: str
    baseline: str
    tested: tuple[str, ...]
    described: tuple[str, ...]
    seeds: range
    network: str
    beside: tuple[str, ...] = ()
    times: str = "verdict-times.csv"
    hypotheses: int = 0

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.baseline, *self.tested, *self.described)

    def keywords(self, variant: str) -> list[str]:
        """Return the keywords of a variant's model, KEY=VALUE."""
        keywords = {
            **NETWORKS[self.network].keywords,
            **({} if variant == self.baseline else mechanism(self.network, variant)),
        }
        return [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in keywords.items()
        ]

    def options(self, variant: str) -> list[str]:
        """Return train-cifar's options for a variant, without data, seed and folder."""
        network, keywords = NETWORKS[self.network], self.keywords(variant)
        length = ["--epochs", str(EPOCHS[variant])] if variant in EPOCHS else []
        return [
            "--model",
            network.model,
            *network.options,
            *_ALL,
            *length,
            *(["--model-kwargs", *keywords] if keywords else []),
        ]

    @property
    def data(self) -> str:
        return NETWORKS[self.network].data

    @property
    def classes(self) -> int:
        return NETWORKS[self.network].classes

    @property
    def own(self) -> tuple[str, ...]:
        """The variants whose runs belong to this part."""
        others = {variant for name in self.beside for variant in RUNS[name].variants}
        return tuple(variant for variant in self.variants if variant not in others)


PARTS = {
    part.name: part
    for part in (
        Part(
            "vit-rival",
            "small ViT with token_conv, CIFAR-10",
            "token_conv",
            ("residual", "ea", "talking_heads", "reattention", "conv2d"),
            (),
            range(100, 108),
            RIVAL,
        ),
        Part(
            "equal-time",
            "the same at equal time",
            LONGER,
            ("conv2d",),
            (),
            range(100, 108),
            RIVAL,
            beside=("vit-rival",),
        ),
        Part(
            "equal-operations",
            "the same at equal operations",
            EVEN,
            (),
            ("conv2d",),
            range(100, 108),
            RIVAL,
            beside=("vit-rival",),
        ),
        Part(
            "cifar100",
            "narrow Conv-Transformer, CIFAR-100",
            "none",
            ("residual", "ea", "talking_heads", "conv2d"),
            ("uniform",),
            range(100, 106),
            NARROW,
        ),
        Part(
            "vit-alone",
            "small ViT, CIFAR-10",
            "plain",
            (),
            ("residual", "conv2d", "uniform"),
            range(100, 105),
            VIT,
        ),
        Part(
            "vit-dear",
            "small ViT with token_conv, the dear ones",
            "token_conv",
            (),
            ("refiner", "mta"),
            range(100, 102),
            RIVAL,
            beside=("vit-rival",),
        ),
    )
}


# README.md, "The second verdict"; the names of variants say how long they train
AS_XSA, AS_GATED = "token_conv as long as xsa", "token_conv as long as gated"
AS_TOKEN_CONV, LONG_TOKEN_CONV, LONG_CONV2D = (
    "plain as long as token_conv",
    "token_conv 64 epochs",
    "conv2d 45 epochs",
)
EPOCHS |= {AS_XSA: 12.61, AS_GATED: 8.84, AS_TOKEN_CONV: 8.72, LONG_TOKEN_CONV: 64, LONG_CONV2D: 45}
SECOND = {
    part.name: part
    for part in (
        Part(
            "second-updates",
            "XSA and gated attention at equal updates",
            "token_conv",
            ("xsa", "gated"),
            (),
            range(200, 208),
            RIVAL,
        ),
        Part(
            "second-xsa",
            "XSA at equal time",
            AS_XSA,
            ("xsa",),
            (),
            range(200, 208),
            RIVAL,
            beside=("second-updates",),
        ),
        Part(
            "second-gated",
            "gated attention at equal time",
            AS_GATED,
            ("gated",),
            (),
            range(200, 208),
            RIVAL,
            beside=("second-updates",),
        ),
        Part(
            "second-token-conv",
            "token_conv at equal time",
            AS_TOKEN_CONV,
            ("token_conv",),
            (),
            range(200, 208),
            VIT,
            beside=("second-updates",),
        ),
        Part(
            "second-long",
            "conv2d at equal time, long training",
            LONG_TOKEN_CONV,
            (LONG_CONV2D,),
            (),
            range(200, 203),
            RIVAL,
        ),
    )
}

# README.md, "The third verdict"
LONG_PLAIN = "plain 69 epochs"
ZERO_TOKEN_CONV = "token_conv from zeros 64 epochs"
AS_ONE_FUNCTION = "token_conv as long as xsa in one function"
EPOCHS |= {LONG_PLAIN: 69, ZERO_TOKEN_CONV: 64, AS_ONE_FUNCTION: 9.86}
THIRD = {
    "third-long": Part(
        "third-long",
        "token_conv at equal time, long training",
        LONG_PLAIN,
        (LONG_TOKEN_CONV,),
        (),
        range(200, 203),
        VIT,
        beside=("second-long",),
    ),
    "third-zeros": Part(
        "third-zeros",
        "token_conv that begins with zeros, long training",
        LONG_PLAIN,
        (),
        (ZERO_TOKEN_CONV,),
        range(200, 201),
        VIT,
        beside=("third-long",),
    ),
    "third-xsa": Part(
        "third-xsa",
        "XSA in one function at equal time",
        AS_ONE_FUNCTION,
        (),
        ("xsa",),
        range(200, 208),
        RIVAL,
        beside=("second-updates",),
    ),
}

# fourth.md
AS_ALL, LONG_ONE = "one convolution as long as token_conv", "one convolution 69 epochs"
EPOCHS |= {AS_ALL: 8.62, LONG_ONE: 69}
FOURTH = {
    part.name: part
    for part in (
        Part(
            "fourth-short",
            "token_conv beside one convolution, equal time",
            AS_ALL,
            ("token_conv",),
            (AS_TOKEN_CONV,),
            range(200, 208),
            ONE,
            beside=("second-updates", "second-token-conv"),
            times="fourth-times.csv",
            hypotheses=2,
        ),
        Part(
            "fourth-long",
            "the same, long training",
            LONG_ONE,
            (LONG_TOKEN_CONV,),
            (),
            range(200, 204),
            ONE,
            beside=("second-long", "fourth-seed"),
            times="fourth-times.csv",
            hypotheses=2,
        ),
        Part(
            "fourth-seed",
            "one more seed of second-long",
            LONG_TOKEN_CONV,
            (),
            (),
            range(203, 204),
            RIVAL,
        ),
    )
}
RUNS = PARTS | SECOND | THIRD | FOURTH


def kinds_of(network: str) -> list[str]:
    """Return the mechanisms of the parts with this network."""
    kinds = [
        variant.partition(" ")[0]
        for part in RUNS.values()
        if part.network == network
        for variant in (*part.tested, *part.described)
    ]
    return [kind for kind in dict.fromkeys(kinds) if kind != "token_conv"]


@functools.cache
def step_times(file: str = "verdict-times.csv") -> Mapping[tuple[str, str], float]:
    """Return processor time of a training step in ms, by network and kind."""
    rows = csv.DictReader((RESULTS / file).read_text(encoding="utf-8").splitlines())
    return {(row["network"], row["kind"]): float(row["train_ms"]) for row in rows}


def run_time(times: Mapping[tuple[str, str], float], part: Part, variant: str) -> float:
    """Return the relative processor time of a run: ms per training step, times its epochs / 8."""
    kind = variant.partition(" ")[0]
    networks = {"plain": VIT, "token_conv": RIVAL}
    if kind in networks:
        step = times[networks[kind], "plain"]
    else:
        step = times[part.network, "plain" if variant == part.baseline else kind]
    return step * EPOCHS.get(variant, 8) / 8

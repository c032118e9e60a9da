"""The parts of the verdict, as README.md of this folder fixes them; run, benchmark, power and analyse read them."""
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "across"
VIT, RIVAL, NARROW = "small ViT", "small ViT, token_conv", "narrow Conv-Transformer"
LONGER, EVEN = "token_conv longer", "token_conv same operations"  # as long as conv2d, in time and in multiply-adds
EPOCHS = {LONGER: 11.92, EVEN: 10.02}  # in place of 8; 11.92 is 8r of README.md, fixed before the runs
_ALL = "--eval-epochs 100 --amp bfloat16 --channels-last --workers 0 --device cpu --test".split()
_VIT = ("--recipe none --opt adamw --lr 2e-3 --sched linear --weight-decay 0.05 --smoothing 0.1 --clip-grad 1 "
        "--epochs 8 --batch-size 128 --cutout 0 --holdout 30000").split()
_NARROW = "--recipe fast --epochs 4 --holdout 5000".split()


@dataclass(frozen=True)
class Network:
    """A network without mechanism, its keywords, its data set and the options that train it."""

    model: str
    keywords: Mapping[str, Any]
    data: str
    classes: int
    options: Sequence[str]


NETWORKS = {
    VIT: Network("vit_mini_patch4_32", {}, "cifar10", 10, _VIT),
    RIVAL: Network("vit_mini_patch4_32", {"token_conv": "paper"}, "cifar10", 10, _VIT),
    NARROW: Network("conv_transformer_cifar", {"widths": [16, 32, 64, 64]}, "cifar100", 100, _NARROW),
}


def mechanism(network: str, kind: str) -> dict[str, Any]:
    """Return the keywords that give the network the mechanism, from its identity start."""
    return {"evolution": kind, **({"start": "identity"} if network == NARROW and kind != "uniform" else {})}


@dataclass(frozen=True)
class Part:
    """A sweep of the verdict: its variants over its seeds, each compared with the baseline.

    tested: the variants that are hypotheses, corrected together (Holm); the others are described.
    network: of verdict-times.csv. beside: the part that has the runs of some of the variants.
    """

    name: str
    title: str
    baseline: str
    tested: tuple[str, ...]
    described: tuple[str, ...]
    seeds: range
    network: str
    beside: str = ""

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.baseline, *self.tested, *self.described)

    def keywords(self, variant: str) -> list[str]:
        """Return the keywords of a variant's model, KEY=VALUE."""
        keywords = {**NETWORKS[self.network].keywords,
                    **({} if variant == self.baseline else mechanism(self.network, variant))}
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keywords.items()]

    def options(self, variant: str) -> list[str]:
        """Return train-cifar's options of a variant, but for its data, seed and folder."""
        network, keywords = NETWORKS[self.network], self.keywords(variant)
        length = ["--epochs", str(EPOCHS[variant])] if variant in EPOCHS else []
        return ["--model", network.model, *network.options, *_ALL, *length,
                *(["--model-kwargs", *keywords] if keywords else [])]

    @property
    def data(self) -> str:
        return NETWORKS[self.network].data

    @property
    def own(self) -> tuple[str, ...]:
        """The variants whose runs are this part's."""
        others = PARTS[self.beside].variants if self.beside else ()
        return tuple(variant for variant in self.variants if variant not in others)


PARTS = {part.name: part for part in (
    Part("vit-rival", "small ViT with token_conv, CIFAR-10", "token_conv",
         ("residual", "ea", "talking_heads", "reattention", "conv2d"), (), range(100, 108), RIVAL),
    Part("equal-time", "the same at equal time", LONGER, ("conv2d",), (),
         range(100, 108), RIVAL, beside="vit-rival"),
    Part("equal-operations", "the same at equal operations", EVEN, (), ("conv2d",),
         range(100, 108), RIVAL, beside="vit-rival"),
    Part("cifar100", "narrow Conv-Transformer, CIFAR-100", "none", ("residual", "ea", "talking_heads", "conv2d"),
         ("uniform",), range(100, 106), NARROW),
    Part("vit-alone", "small ViT, CIFAR-10", "plain", (), ("residual", "conv2d", "uniform"), range(100, 105), VIT),
    Part("vit-dear", "small ViT with token_conv, the dear ones", "token_conv", (), ("refiner", "mta"),
         range(100, 102), RIVAL, beside="vit-rival"),
)}


def kinds_of(network: str) -> list[str]:
    """Return the mechanisms of the parts with this network."""
    return list(dict.fromkeys(kind for part in PARTS.values() if part.network == network
                              for kind in (*part.tested, *part.described)))


def step_times() -> Mapping[tuple[str, str], float]:
    """Return processor time of a training step in ms, by network and kind."""
    rows = csv.DictReader((RESULTS / "verdict-times.csv").read_text(encoding="utf-8").splitlines())
    return {(row["network"], row["kind"]): float(row["train_ms"]) for row in rows}

"""The parts of the verdict, as README.md of this folder fixes them; benchmark, power and analysis read them here."""
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results" / "across"
VIT, RIVAL, NARROW = "small ViT", "small ViT, token_conv", "narrow Conv-Transformer"


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

    @property
    def own(self) -> tuple[str, ...]:
        """The variants whose runs are this part's."""
        others = PARTS[self.beside].variants if self.beside else ()
        return tuple(variant for variant in self.variants if variant not in others)


PARTS = {part.name: part for part in (
    Part("vit-rival", "small ViT with token_conv, CIFAR-10", "token_conv",
         ("residual", "ea", "talking_heads", "reattention", "conv2d"), (), range(100, 108), RIVAL),
    Part("equal-time", "the same, token_conv alone as long as conv2d takes", "token_conv longer", ("conv2d",), (),
         range(100, 108), RIVAL, beside="vit-rival"),
    Part("vit-dear", "the same, the dear ones", "token_conv", (), ("refiner", "mta"), range(100, 102), RIVAL,
         beside="vit-rival"),
    Part("vit-alone", "small ViT, CIFAR-10", "plain", (), ("residual", "conv2d", "uniform"), range(100, 105), VIT),
    Part("cifar100", "narrow Conv-Transformer, CIFAR-100", "none", ("residual", "ea", "talking_heads", "conv2d"),
         ("uniform",), range(100, 106), NARROW),
)}


def kinds_of(network: str) -> list[str]:
    """Return the mechanisms of the parts with this network."""
    return list(dict.fromkeys(kind for part in PARTS.values() if part.network == network
                              for kind in (*part.tested, *part.described)))


def step_times() -> Mapping[tuple[str, str], float]:
    """Return processor time of a training step in ms, by network and kind."""
    rows = csv.DictReader((RESULTS / "verdict-times.csv").read_text(encoding="utf-8").splitlines())
    return {(row["network"], row["kind"]): float(row["train_ms"]) for row in rows}

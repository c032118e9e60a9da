"""Attention in few places of a trained ResNet, against the plain network at equal time. See README.md of this folder.

    python -m experiments.cheap_attention.run times
    python -m experiments.cheap_attention.run pilot TINY-IMAGENET SCENES RUNS
    python -m experiments.cheap_attention.run rates TINY-IMAGENET SCENES RUNS --rates 3 10
    python -m experiments.cheap_attention.run lengths TINY-IMAGENET SCENES RUNS --epochs 24 30 --seeds 100
    python -m experiments.cheap_attention.run study TINY-IMAGENET SCENES RUNS
    python -m experiments.cheap_attention.run analyse

The same command continues an incomplete run and skips complete ones. Only `study` sees the test photos.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pandas as pd
import timm
import torch

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.base.provenance import hardware
from ea_vision.engine import run_folder
from ea_vision.engine.config import load_recipe
from ea_vision.models.modes import lay_out
from experiments.added_attention.run import PHOTOS, PRETRAINING, TUNING, train
from experiments.benchmark import Steps, interleaved
from experiments.evidence import by_seed_and_variant, holm, paired, read_runs
from experiments.finetune_scenes.run import pick, test, tested_runs
from experiments.pages import MINUS, by_seed, markdown, points, shown_p

RESULTS = Path(__file__).resolve().parents[1] / "results"
TIMES = RESULTS / "cheap-attention-times.csv"
PILOT = RESULTS / "cheap-attention-pilot.csv"
RATES = RESULTS / "cheap-attention-rates.csv"
LENGTH_RUNS = RESULTS / "cheap-attention-lengths.csv"
RUNS = RESULTS / "cheap-attention-runs.csv"
PILOT_SEEDS = range(100, 103)
SEEDS = range(110, 118)
SHORT = 6  # epochs
SIDE = 112
BATCH = 50
PLACEMENTS = {
    "late": {"fusion": "add", "attn_stages": (3, 4)},
    "last": {"fusion": "add", "attn_stages": (4,)},
    "instead": {"fusion": "concat", "attn_stages": (4,), "qk_ratio": 1.0, "v_ratio": 1.0},
}


@dataclass(frozen=True)
class Study:
    """What the pilots chose.

    Attributes:
        placement: key of PLACEMENTS.
        rate, plain_rate: learning rates of the placement and of the plain network, in units of the recipe's; None: not
            chosen yet, so that only questions 1 and 3 have runs.
        long: epochs of the converged pair; 0: not chosen yet.
    """

    placement: str
    rate: int | None = None
    plain_rate: int | None = None
    long: int = 0

    def plain(self, epochs: float, rate: int = 1) -> str:
        """Return the way that the plain network trains as long as the placement's epochs."""
        return at_rate(f"plain as long as {self.placement} {epochs:g}", rate)

    def equal_time(self, epochs: float, rate: int = 1) -> dict[str, float]:
        """Return the epochs of this way, by its name."""
        return {self.plain(epochs, rate): round(epochs * ratio_of(self.placement), 2)}

    def parts(self) -> dict[int, dict[str, float]]:
        """Return the epochs of each way by question, in the order in which they are answered; 1 answers 3, too."""
        name = self.placement
        parts = {1: {name: SHORT, f"{name} uniform": SHORT, **self.equal_time(SHORT)}}
        if self.rate and self.plain_rate:
            tuned = at_rate(name, self.rate)
            parts[4] = {tuned: SHORT, **self.equal_time(SHORT, self.plain_rate)}
            parts[5] = {at_rate(f"{name} uniform", self.rate): SHORT}
        if self.long:
            long = at_rate(f"{name} long", self.rate)
            parts[2] = {long: self.long, **self.equal_time(self.long, self.plain_rate)}
        return parts

    def questions(self) -> list[tuple[str, str]]:
        """Return the pairs of ways that questions 1, 3, 4, 5 and 2 compare, as far as they are chosen."""
        name = self.placement
        pairs = [(name, self.plain(SHORT)), (name, f"{name} uniform")]
        if self.rate and self.plain_rate:
            tuned = at_rate(name, self.rate)
            pairs.append((tuned, self.plain(SHORT, self.plain_rate)))
            pairs.append((tuned, at_rate(f"{name} uniform", self.rate)))
        if self.long:
            long = at_rate(f"{name} long", self.rate)
            pairs.append((long, self.plain(self.long, self.plain_rate)))
        return pairs


HYPOTHESES = 5  # questions, tested together
ANSWERED = (1, 4, 5, 2)  # in this order; the runs of 1 answer 3, too
STUDY = Study("instead", rate=30, plain_rate=30, long=24)


def at_rate(way: str, rate: int) -> str:
    """Return the name of a way at another learning rate, in units of the recipe's."""
    return way if rate == 1 else f"{way} rate {rate}"


def keywords_of(way: str) -> dict:
    """Return the keywords of `aa_resnet34_050` for a placement, "late", or its control, "late uniform".

    "late long" is "late", trained for longer.
    """
    placement, _, control = way.partition(" ")
    return PLACEMENTS[placement] | ({"evolution": "uniform"} if control == "uniform" else {})


def measure() -> int:
    """Time a training step of every network in turns and write this machine's rows of TIMES."""
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    calls = {}
    for way in ("plain", *PLACEMENTS, *(f"{name} uniform" for name in PLACEMENTS)):
        name, keywords = (
            ("resnet34_050", {}) if way == "plain" else ("aa_resnet34_050", keywords_of(way))
        )
        model = timm.create_model(name, num_classes=6, **keywords)
        calls[way] = Steps(lay_out(model, torch.channels_last), images, "bfloat16", "adamw").train
    seconds = interleaved(calls, 15, clock=time.process_time)
    rows = []
    for way, value in seconds.items():
        ratio = round(value / seconds["plain"], 3)
        rows.append({"way": way, "train_ms": round(1e3 * value, 1), "ratio": ratio})
    table = pd.DataFrame(rows).assign(hardware=machine(), torch=torch.__version__)
    print(table.to_string(index=False))
    if TIMES.exists():
        former = pd.read_csv(TIMES)
        table = pd.concat([former[former["hardware"] != machine()], table])
    table.to_csv(TIMES, index=False)
    return 0


def machine() -> str:
    """Return this machine's name in TIMES."""
    return hardware(torch.device("cpu"), 1)


def ratio_of(placement: str) -> float:
    """Return the processor time of a placement's training step on this machine, in plain steps."""
    ratios = {}
    if TIMES.exists():
        times = pd.read_csv(TIMES)
        ratios = times[times["hardware"] == machine()].set_index("way")["ratio"]
    if placement not in ratios:
        raise UsageError(
            f"the ratios of steps must be measured first: run `times`, {TIMES} has none of {machine()}"
        )
    return float(ratios[placement])


def options_of(way: str, epochs: float) -> str:
    """Return the trainer's options for a way: a placement, its control, or "plain ...", perhaps at another rate."""
    way, _, rate = way.partition(" rate ")
    options = f"{TUNING} --epochs {epochs:g}"
    if rate:
        options += f" --lr {int(rate) * load_recipe('finetune_resnet')['lr']:g}"
    if way.startswith("plain"):
        return f"{options} --model resnet34_050 --attention-lr 1"
    pairs = []
    for name, value in keywords_of(way).items():
        shown = str(list(value)).replace(" ", "") if isinstance(value, tuple) else value
        pairs.append(f"{name}={shown}")
    return f"{options} --model aa_resnet34_050 --model-kwargs {' '.join(pairs)}"


def run_all(
    args: argparse.Namespace, more: list[str], lengths: dict[str, float], seeds: Sequence[int]
) -> Iterator[tuple[str, int, Path]]:
    """Train each way for its epochs with each seed, seed by seed; yield way, seed and folder of each run."""
    data = args.runs / "data"
    pick(args.scenes, data, PHOTOS)
    pretrained = args.runs / "pretrained"
    train(f"--model resnet34_050 {PRETRAINING}", args.tiny_imagenet, pretrained, more)
    start = pretrained / run_folder.WEIGHTS
    for seed in seeds:
        for way, epochs in lengths.items():
            output = args.runs / f"{way}-{seed}"
            options = f"{options_of(way, epochs)} --seed {seed} --pretrained-path {start}"
            train(options, data, output, more)
            yield way, seed, output


def validate(
    args: argparse.Namespace, more: list[str], lengths: dict[str, float], file: Path
) -> int:
    """Train the ways and keep their best top-1 on the validation photos in a file."""
    for way, seed, output in run_all(args, more, lengths, args.seeds):
        results = run_folder.read_results(output)
        top1 = results[f"{results['eval_split']}_best"]["top1"]
        row = {"way": way, "seed": seed, "epochs": lengths[way], "validation_top1": top1}
        keep(file, [row], "way")
        print(row, flush=True)
    return 0


def keep(file: Path, rows: list[dict], way: str) -> None:
    """Write rows into a file in place of those of the same way and seed; its others stay. `way`: the column of ways."""
    new = {(row[way], str(row["seed"])) for row in rows}
    former = []
    if file.exists():
        former = pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")
    others = [row for row in former if (row[way], row["seed"]) not in new]
    atomic_write(file, csv_text([*others, *rows]).encode())


def pilot(args: argparse.Namespace, more: list[str]) -> int:
    """Make the runs that choose the placement."""
    lengths = {}
    for placement in PLACEMENTS:
        lengths |= {placement: SHORT, **Study(placement).equal_time(SHORT)}
    return validate(args, more, lengths, PILOT)


def choose_rates(args: argparse.Namespace, more: list[str]) -> int:
    """Make the runs that choose the learning rates of the placement and of the plain network."""
    lengths = {}
    for rate in args.rates:
        lengths |= {at_rate(STUDY.placement, rate): SHORT, **STUDY.equal_time(SHORT, rate)}
    return validate(args, more, lengths, RATES)


def choose_lengths(args: argparse.Namespace, more: list[str]) -> int:
    """Make the runs of the plain network that choose the length of "converged"."""
    if STUDY.plain_rate is None:
        raise UsageError("the plain network's rate must be chosen first, and entered in STUDY")
    lengths = {at_rate(f"plain {epochs}", STUDY.plain_rate): epochs for epochs in args.epochs}
    return validate(args, more, lengths, LENGTH_RUNS)


def study(args: argparse.Namespace, more: list[str]) -> int:
    """Make the runs that STUDY names, test each once, and keep their rows in RUNS."""
    parts = STUDY.parts()
    ways = list(dict.fromkeys(chain.from_iterable(parts.values())))
    for question in args.questions or parts:
        if question not in parts:
            raise UsageError(f"STUDY must name the runs of question {question} first")
        for _, _, output in run_all(args, more, parts[question], args.seeds):
            test(output, args.runs / "data")
            keep(RUNS, tested_runs(args.runs, ways, args.runs / "data"), "variant")
    return 0


def answers() -> list[str]:
    """Return a table of the questions of which two seeds or more have both runs, corrected for all questions."""
    top1 = by_seed_and_way()
    effects = {}
    for better, worse in STUDY.questions():
        if not {better, worse} <= {*top1}:
            continue
        gains = (top1[better] - top1[worse]).dropna()
        if len(gains) > 1:
            effects[f"{better} {MINUS} {worse}"] = paired(gains) | {"spread": gains.std()}
    corrected = holm([effect["p"] for effect in effects.values()], HYPOTHESES)
    rows = []
    for (pair, effect), p in zip(effects.items(), corrected, strict=True):
        rows.append(
            [pair, str(effect["seeds"]), points(effect), f"{effect['spread']:.2f}", shown_p(p)]
        )
    return markdown(
        ["difference", "seeds", "points (95% interval)", "spread", "p, corrected"], rows
    )


def by_seed_and_way() -> pd.DataFrame:
    """Return top-1 in percent, one row per seed and one column per way, NaN where a run is missing."""
    if not RUNS.exists():
        raise UsageError(f"no runs to analyse: {RUNS} is missing")
    return by_seed_and_variant(read_runs(RUNS))


def analyse() -> int:
    """Print top-1 by seed and the answers."""
    top1 = by_seed_and_way()
    print(*by_seed(top1, list(top1)), "", *answers(), sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("times", help="time the steps")
    parts.add_parser("analyse", help="print the answers")
    runs = {"pilot": pilot, "rates": choose_rates, "lengths": choose_lengths, "study": study}
    for name, make in runs.items():
        part = parts.add_parser(name, help=str(make.__doc__).splitlines()[0])
        part.add_argument("tiny_imagenet", type=Path)
        part.add_argument("scenes", type=Path)
        part.add_argument("runs", type=Path)
        if name == "rates":
            part.add_argument(
                "--rates", type=int, nargs="+", required=True, help="in units of the recipe's"
            )
        if name == "lengths":
            part.add_argument("--epochs", type=int, nargs="+", required=True)
        if name == "study":
            part.add_argument(
                "--questions", type=int, nargs="+", choices=ANSWERED, help="(default: all)"
            )
        seeds = SEEDS if name == "study" else PILOT_SEEDS
        shown = f"(default: {seeds[0]} to {seeds[-1]})"
        part.add_argument("--seeds", type=int, nargs="+", default=seeds, help=shown)
    args, more = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    if args.part == "times":
        return measure()
    if args.part == "analyse":
        return analyse()
    return runs[args.part](args, more)


if __name__ == "__main__":
    sys.exit(exit_code(main))

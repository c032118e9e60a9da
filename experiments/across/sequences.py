"""Two tasks without images for attention across layers: associative recall, and the next character.

    python -m experiments.across.sequences recall recall.csv                       # from the root of a checkout
    python -m experiments.across.sequences characters characters.csv --seeds 0 1 2 --kinds none residual token_conv

recall: eight pairs of a key and a value, followed by one of the keys: 17 tokens, (k1 v1 ... k8 v8 k). The answer is the
    value of that key. 16 keys and 16 values, drawn anew for each sequence. The encoder has no mask, so every mechanism
    runs unchanged, `conv2d` on a map of 1 x 17. Accuracy on 4,096 sequences.
characters: CPython's documentation (`pydoc_data.topics`), every fifth topic held out; windows of 64 under a causal
    mask. Only mechanisms that read nothing behind the mask take part: residual, talking_heads, and EA in its causal
    form. Bits per character on the held-out topics.

Two blocks, 64 wide, 4 heads; AdamW, one-cycle rate up to 0.002, weight decay 0.01, clipped at 1. Each mechanism begins
as the plain network. KIND+token_conv also has a depthwise convolution over 3 tokens (past tokens only, under the mask)
before the second block. Rows are written one by one; rows that the table already has are not computed again.
"""

import argparse
import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.base.files import atomic_write, csv_text
from ea_vision.layers import create_evolution
from ea_vision.ops.reference import mask_logits

WIDTH = 64
HEADS = 4
DEPTH = 2
PAIRS = 8
SYMBOLS = 16
LENGTH = {"recall": 2 * PAIRS + 1, "characters": 64}
UPDATES = {"recall": 1600, "characters": 400}
MECHANISMS = {
    "recall": ("residual", "ea", "talking_heads", "reattention", "refiner", "mta", "conv2d"),
    "characters": ("residual", "ea", "talking_heads"),
}


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm (pre-norm): (x, prev_logits) -> (x, logits)."""

    def __init__(self, kind: str | None, first: bool, token_conv: bool, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        form = {"causal": "self"} if causal and kind == "ea" else {}
        start = None if kind is None else "identity"
        evolution = create_evolution(kind, HEADS, start=start, **form)
        needs_other = evolution is not None and evolution.reads_previous and not form
        self.evolution = None if first and needs_other else evolution
        self.token_conv = None
        if token_conv and not first:
            self.token_conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.causal = causal

    def forward(self, x: Tensor, prev_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        B, N, _ = x.shape
        if self.token_conv is not None:
            padded = F.pad(x.transpose(1, 2), (2, 0) if self.causal else (1, 1))
            x = x + self.token_conv(padded).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(x)).view(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.evolution is not None:
            prev_logits = logits if prev_logits is None else prev_logits
            size = ((1, N),) if self.evolution.spatial else ()
            logits = self.evolution(logits, prev_logits, *size)
        attn = mask_logits(logits, "self" if self.causal else "none").softmax(-1)
        if self.evolution is not None:
            attn = self.evolution.mix_attn(attn)
            if self.causal:  # a bias after the softmax would show hidden tokens
                attn = attn.tril()
        x = x + self.proj((attn @ v).transpose(1, 2).reshape(B, N, WIDTH))
        return x + self.mlp(self.norm2(x)), logits


class Sequences(nn.Module):
    """Symbols (B, N) -> logits (B, N, symbols)."""

    def __init__(self, symbols: int, variant: str, task: str) -> None:
        super().__init__()
        parts = variant.split("+")
        kind = parts[0] if parts[0] not in ("none", "token_conv") else None
        self.embed = nn.Embedding(symbols, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH[task], WIDTH))
        options = {"token_conv": "token_conv" in parts, "causal": task == "characters"}
        blocks = [Block(kind, number == 0, **options) for number in range(DEPTH)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.embed(symbols) + self.position[: symbols.shape[1]]
        logits = None
        for block in self.blocks:
            x, logits = block(x, logits)
        return self.head(self.norm(x))


def recall(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences (count, 17), with keys 0 to 15 and values 16 to 31, and the answers, (count)."""
    keys = torch.rand(count, SYMBOLS, generator=generator).argsort(1)[:, :PAIRS]
    values = SYMBOLS + torch.randint(SYMBOLS, (count, PAIRS), generator=generator)
    key = torch.randint(PAIRS, (count, 1), generator=generator)
    pairs = torch.stack([keys, values], dim=2).flatten(1)
    return torch.cat([pairs, keys.gather(1, key)], dim=1), values.gather(1, key)[:, 0]


def batches(task: str, seed: int, text: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        if task == "recall":
            yield recall(64, generator)
        else:
            starts = torch.randint(len(text) - LENGTH[task], (32, 1), generator=generator)
            windows = text[starts + torch.arange(LENGTH[task] + 1)]
            yield windows[:, :-1], windows[:, 1:]


def load_text() -> tuple[Tensor, list[Tensor], int]:
    """Return the training topics as one text, the held-out topics, and the number of symbols; symbol 0 stands for all
    characters that do not occur in training."""
    names = sorted(topics)
    training_names = [name for number, name in enumerate(names) if number % 5 != 4]
    training = "\n".join(topics[name] for name in training_names)
    code = {character: number for number, character in enumerate(sorted(set(training)), start=1)}
    held_out = []
    for name in names[4::5]:
        held_out.append(torch.tensor([code.get(c, 0) for c in topics[name]]))
    return torch.tensor([code[c] for c in training]), held_out, len(code) + 1


def loss_of(model: Sequences, task: str, symbols: Tensor, wanted: Tensor) -> Tensor:
    logits = model(symbols)
    return F.cross_entropy(logits[:, -1] if task == "recall" else logits.transpose(1, 2), wanted)


@torch.no_grad()
def evaluate(model: Sequences, task: str, held_out: list[Tensor]) -> float:
    """Return recall's accuracy in percent, or bits per character over whole windows of the held-out texts."""
    model.eval()
    if task == "recall":
        symbols, wanted = recall(4096, torch.Generator().manual_seed(2**31))
        return 100 * (model(symbols)[:, -1].argmax(-1) == wanted).float().mean().item()
    size = LENGTH[task] + 1
    windows = []
    for text in held_out:
        windows += [window for window in text.split(size) if len(window) == size]
    total = 0.0
    for part in torch.stack(windows).split(256):
        total += loss_of(model, task, part[:, :-1], part[:, 1:]) * len(part)
    return (total / len(windows)).item() / math.log(2)


def train(
    task: str, variant: str, seed: int, updates: int | None = None
) -> dict[str, str | int | float]:
    """Train one network and return its row of the table."""
    updates = UPDATES[task] if updates is None else updates
    text, held_out, symbols = load_text() if task == "characters" else (None, [], 2 * SYMBOLS)
    torch.manual_seed(seed)
    model = Sequences(symbols, variant, task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=updates)
    began = time.process_time()
    for _, (inputs, wanted) in zip(range(updates), batches(task, seed, text), strict=False):
        loss = loss_of(model, task, inputs, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - began
    return {
        "task": task,
        "variant": variant,
        "seed": seed,
        "updates": updates,
        "result": round(evaluate(model, task, held_out), 4),
        "cpu_seconds": round(seconds, 2),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=LENGTH)
    parser.add_argument("csv", type=Path, help="the table to write, or to continue")
    parser.add_argument(
        "--kinds",
        nargs="+",
        help="default: all kinds of the task, each with and without token_conv",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, help=f"default: {UPDATES}")
    args = parser.parse_args(argv)
    alone = ("none", *MECHANISMS[args.task])
    all_kinds = [*alone, "token_conv", *(f"{kind}+token_conv" for kind in alone[1:])]
    kinds = args.kinds or all_kinds
    if not set(kinds) <= set(all_kinds):  # other kinds would read masked tokens
        parser.error(f"{args.task} takes the kinds {', '.join(all_kinds)}, got {' '.join(kinds)}")
    rows = list(csv.DictReader(args.csv.open(encoding="utf-8"))) if args.csv.exists() else []
    rows_done = {
        (row["task"], row["variant"], int(row["seed"]), int(row["updates"])) for row in rows
    }
    for seed in args.seeds:
        for kind in kinds:
            if (args.task, kind, seed, args.updates or UPDATES[args.task]) in rows_done:
                continue
            rows.append(train(args.task, kind, seed, args.updates))
            print(*rows[-1].values(), flush=True)
            atomic_write(args.csv, csv_text(rows).encode())


if __name__ == "__main__":
    main()

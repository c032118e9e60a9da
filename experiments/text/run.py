"""Make the runs of README.md that have no row yet, seed by seed, and compare the networks that have rows.

    OMP_NUM_THREADS=1 python -m experiments.text.run SST
    python -m experiments.text.run SST --device cuda --jobs 5
    python -m experiments.text.run --compare

SST is a folder with sst_train.txt, sst_dev.txt and sst_test.txt, whose lines are "__label__N sentence", N from 1 to 5.
A finished run is a row of experiments/results/sst.csv; the next call makes the missing runs.
"""

import argparse
import hashlib
import math
import sys
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.base.devices import choose_device
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.provenance import hardware
from ea_vision.layers import create_evolution
from ea_vision.ops.reference import attention_of, mask_logits
from experiments.evidence import holm, paired

RESULTS = Path(__file__).resolve().parents[1] / "results" / "sst.csv"
NETWORKS = {  # kind and options of the evolution in blocks 2 and 3
    "none": (None, {}),
    "PA": ("pa", {"alpha": 0.1}),
    "EA": ("ea", {"alpha": 0.1, "beta": 0.1}),
}
SEEDS = range(10)
COLUMNS = "network seed dev test train_loss seconds data torch hardware".split()
WIDTH = 256
HEADS = 8
BLOCKS = 3
LENGTH = 64  # tokens of a sentence, at most
REACH = 16  # tokens, of relative positions
EPOCHS = 10
BATCH = 64
FIRST_LR = 4e-4
LAST_LR = 1e-6
PAD = 0
UNKNOWN = 1
Sentence = tuple[list[int], int]  # words, class


class Attention(nn.Module):
    """Self-attention with Shaw's relative positions, added to keys and values, clipped at REACH tokens."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Parameter(0.02 * torch.randn(2 * REACH + 1, WIDTH // HEADS))
        self.values = nn.Parameter(0.02 * torch.randn(2 * REACH + 1, WIDTH // HEADS))
        self.dropout = nn.Dropout(0.2)
        self.evolution: nn.Module | None = None

    def forward(self, x: Tensor, padding: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend over (B, T, C) tokens; return them and the logits (B, K, T, T), which the next block reads."""
        q, k, v = self.project(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1], device=x.device)
        offsets = (places - places[:, None]).clamp(-REACH, REACH) + REACH
        q = q * q.shape[-1] ** -0.5
        relative = torch.einsum("bkid,ijd->bkij", q, self.keys[offsets])
        logits = q @ k.transpose(-2, -1) + relative
        if self.evolution is not None:
            logits = self.evolution(logits, previous, padding)
        attn = self.dropout(attention_of(mask_logits(logits, key_padding=padding)))
        out = attn @ v + torch.einsum("bkij,ijd->bkid", attn, self.values[offsets])
        return self.out(out.transpose(1, 2).flatten(2)), logits


class Block(nn.Module):
    """Attention and a feed-forward layer, each followed by its residual sum and a norm (post-norm)."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, padding: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        attended, logits = self.attention(x, padding, previous)
        x = self.norms[0](x + self.dropout(attended))
        hidden = self.dropout(F.relu(self.wide(x)))
        return self.norms[1](x + self.dropout(self.narrow(hidden))), logits


class Classifier(nn.Module):
    """Words to five classes: trained embeddings, three blocks, the mean over the sentence's tokens."""

    def __init__(self, words: int, network: str):
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH, padding_idx=PAD)
        self.embedding_dropout = nn.Dropout(0.4)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 5)
        # Created last, so that a seed gives all networks the same initial weights.
        kind, options = NETWORKS[network]
        for block in self.blocks[1:]:
            block.attention.evolution = create_evolution(kind, HEADS, **options)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == PAD
        x = self.embedding_dropout(self.embedding(ids))
        logits = None
        for block in self.blocks:
            x, logits = block(x, padding, logits)
        real = (~padding)[..., None].to(x.dtype)
        return self.head((x * real).sum(1) / real.sum(1))


def read(folder: Path, limit: int | None) -> tuple[dict[str, list[Sentence]], int]:
    """Return the sentences of train, dev and test as numbers of words, and the size of the vocabulary.

    limit: sentences per file; None is all. Words that occur only once in the training sentences count as unknown.
    """
    texts = {}
    for split in ("train", "dev", "test"):
        lines = (folder / f"sst_{split}.txt").read_text(encoding="utf-8").splitlines()
        texts[split] = [line.lower().split() for line in lines[:limit]]
    counts = Counter(word for line in texts["train"] for word in line[1:])
    vocabulary = sorted(word for word, count in counts.items() if count > 1)
    numbers = {word: number for number, word in enumerate(vocabulary, start=2)}
    data = {}
    for split, lines in texts.items():
        data[split] = []
        for label, *words in lines:
            ids = [numbers.get(word, UNKNOWN) for word in words[:LENGTH]]
            data[split].append((ids, int(label.removeprefix("__label__")) - 1))
    return data, len(vocabulary) + 2


def batches(sentences: list[Sentence], generator: torch.Generator | None) -> list:
    """Return batches (ids (B, T), classes (B)) of sentences of similar length; a generator shuffles them."""
    order = list(range(len(sentences)))
    if generator is not None:
        order = torch.randperm(len(sentences), generator=generator).tolist()
    order.sort(key=lambda index: len(sentences[index][0]))  # stable: equal lengths stay shuffled
    padded_batches = []
    for first in range(0, len(order), BATCH):
        batch = [sentences[index] for index in order[first : first + BATCH]]
        ids = [torch.tensor(words) for words, _ in batch]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
        padded_batches.append((padded, torch.tensor([label for _, label in batch])))
    if generator is None:
        return padded_batches
    return [
        padded_batches[index]
        for index in torch.randperm(len(padded_batches), generator=generator).tolist()
    ]


@torch.no_grad()
def accuracy(model: nn.Module, sentences: list[Sentence]) -> float:
    """Return the percentage of sentences whose class is right."""
    model.eval()
    device = model.head.weight.device
    right = 0
    for ids, labels in batches(sentences, None):
        predicted = model(ids.to(device)).argmax(1).cpu()
        right += int((predicted == labels).sum())
    return 100.0 * right / len(sentences)


def train(
    data: dict[str, list[Sentence]],
    words: int,
    network: str,
    seed: int,
    epochs: int,
    device: torch.device,
) -> dict:
    """Train one network; return the figures of its row, measured with the last weights."""
    torch.manual_seed(seed)
    model = Classifier(words, network).to(device)
    torch.manual_seed(seed)  # for dropout; the batches have a separate generator
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=FIRST_LR)
    steps = epochs * math.ceil(len(data["train"]) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, LAST_LR)
    began = time.perf_counter()
    for _ in range(epochs):
        model.train()
        for ids, labels in batches(data["train"], generator):
            loss = F.cross_entropy(model(ids.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds = round(time.perf_counter() - began, 1)
    scores = {split: round(accuracy(model, data[split]), 3) for split in ("dev", "test")}
    return {**scores, "train_loss": round(loss.item(), 4), "seconds": seconds}


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Return mean accuracy per network, and PA - none and EA - none over the seeds that all three have."""
    test = rows.pivot(index="seed", columns="network", values="test")
    complete = test.reindex(columns=list(NETWORKS)).dropna()
    print(complete.agg(["mean", "std", "count"]).round(2).to_string())
    effects = [paired(complete[name] - complete["none"], 0.01) for name in ("PA", "EA")]
    table = pd.DataFrame(effects, index=["PA - none", "EA - none"])
    table["p_holm"] = holm(table["p"])
    return table.round(4)


def make(task: tuple) -> dict:
    """Train one network in this process; return its row, without the data's fingerprint."""
    data, words, network, seed, epochs, device = task
    torch.set_num_threads(1)
    figures = train(data, words, network, seed, epochs, device)
    where = {"torch": str(torch.__version__), "hardware": hardware(device, 1)}
    return {"network": network, "seed": seed, **figures, **where}


def fingerprint(sst: Path) -> str:
    """Return the first digits of the three files' digest."""
    digest = hashlib.sha256()
    for split in ("train", "dev", "test"):
        digest.update((sst / f"sst_{split}.txt").read_bytes())
    return digest.hexdigest()[:16]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sst", type=Path, nargs="?", help="folder of the sentences")
    parser.add_argument("--compare", action="store_true", help="compare the finished runs")
    parser.add_argument("--trial", action="store_true", help="200 sentences, one epoch, no rows")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--rows", type=Path, default=RESULTS, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    rows = pd.DataFrame(columns=["network", "seed"])
    if args.rows.exists():
        rows = pd.read_csv(args.rows)
    if args.compare:
        print(compare(rows).to_string())
        return 0
    if args.sst is None:
        parser.error("SST, the folder of the sentences, is required")
    source = fingerprint(args.sst)
    if not args.trial and not set(rows.get("data", ())) <= {source}:
        raise UsageError(f"{args.rows} has rows of other sentences than those in {args.sst}")
    done = set(zip(rows["network"], rows["seed"], strict=True))
    data, words = read(args.sst, 200 if args.trial else None)
    epochs = 1 if args.trial else EPOCHS
    device = choose_device(args.device)
    tasks = [
        (data, words, network, seed, epochs, device)
        for seed in (SEEDS[:1] if args.trial else SEEDS)
        for network in NETWORKS
        if args.trial or (network, seed) not in done
    ]
    with get_context("spawn").Pool(args.jobs) as pool:
        for row in pool.imap_unordered(make, tasks):
            print(row, flush=True)
            if not args.trial:
                table = pd.DataFrame([{**row, "data": source}])[COLUMNS]
                table.to_csv(args.rows, mode="a", header=not args.rows.exists(), index=False)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

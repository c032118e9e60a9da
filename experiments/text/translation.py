"""Train T5, plain and evolving, to write numbers in words: a smoke test of encoder and decoder, not evidence.

    OMP_NUM_THREADS=1 python -m experiments.text.translation

Each network (T5 with 2 + 2 layers of width 64, random weights) trains on 9,500 of the numbers below 10,000 and is
tested on the other 500, which it writes word by word. One network needs about 75 seconds of processor time (Xeon).
Results: experiments/results/translation.csv; its seconds are wall-clock times on a machine that also did other work.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import ea_vision
from ea_vision.base.errors import exit_code
from ea_vision.base.provenance import hardware

RESULTS = Path(__file__).parents[1] / "results" / "translation.csv"
NETWORKS = ("none", "EA", "PA")
NUMBERS = 10_000
HELD_OUT = 500
STEPS = 1_000
BATCH = 64
LR = 2e-3
SEED = 0
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = ["<pad>", "<end>", *SMALL, *TENS, "hundred", "thousand", "and"]  # T5 begins with padding
PAD = 0
END = 1
FIRST_DIGIT = len(WORDS)
IGNORED = -100  # a label that transformers leaves out of the loss


def in_words(number: int) -> list[str]:
    """Return a number below 10,000 as English words: 1205 -> one thousand two hundred and five."""
    words = []
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            words += [SMALL[number // size], name]
            number %= size
    if words and number:
        words.append("and")
    if number >= 20:
        words.append(TENS[number // 10 - 2])
        number %= 10
    if number or not words:
        words.append(SMALL[number])
    return words


def digits_of(number: int) -> Tensor:
    """Return the tokens of a number's digits, as many as it has."""
    return torch.tensor([FIRST_DIGIT + int(digit) for digit in str(number)])


def words_of(number: int) -> Tensor:
    """Return the tokens of a number's words and of their end."""
    return torch.tensor([*map(WORDS.index, in_words(number)), END])


def batch_of(numbers: Sequence[int]) -> dict[str, Tensor]:
    """Return digits and words of numbers as a batch for T5, (B, T) each."""
    ids = pad_sequence(list(map(digits_of, numbers)), True, PAD)
    labels = pad_sequence(list(map(words_of, numbers)), True, IGNORED)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def create(network: str) -> nn.Module:
    """Return T5, with the same random weights for every network. EA evolves everywhere, PA in the encoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(SEED)
    config = T5Config(
        vocab_size=FIRST_DIGIT + 10,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    model = T5ForConditionalGeneration(config)
    if network == "EA":
        return ea_vision.evolve(model, "ea", start="paper", beta=0.5)
    if network == "PA":
        model.encoder = ea_vision.evolve(model.encoder, "pa", start="paper")
    return model


def train(model: nn.Module, numbers: Tensor, steps: int) -> list[float]:
    """Train on numbers, and return the loss of each step."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    model.train()
    for _ in range(steps):
        batch = numbers[torch.randint(len(numbers), (BATCH,), generator=generator)]
        loss = model(**batch_of(batch.tolist())).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def translate(model: nn.Module, numbers: Sequence[int], use_cache: bool) -> list[list[str]]:
    """Return the words that a model writes for numbers, by greedy decoding."""
    batch = batch_of(numbers)
    del batch["labels"]
    model.eval()
    written = model.generate(**batch, do_sample=False, max_new_tokens=12, use_cache=use_cache)
    sentences = []
    for row in written[:, 1:].tolist():
        end = row.index(END) if END in row else len(row)
        sentences.append([WORDS[token] if token < len(WORDS) else "?" for token in row[:end]])
    return sentences


def run(network: str, steps: int) -> dict:
    """Train and test one network, and return its row."""
    import transformers

    numbers = torch.randperm(NUMBERS, generator=torch.Generator().manual_seed(SEED))
    held_out = numbers[:HELD_OUT].tolist()
    model = create(network)
    began = time.perf_counter()
    losses = train(model, numbers[HELD_OUT:], steps)
    seconds = time.perf_counter() - began
    last_losses = losses[-20:]
    written = translate(model, held_out, use_cache=network != "EA")
    right = sum(words == in_words(number) for words, number in zip(written, held_out, strict=True))
    return {
        "network": network,
        "steps": steps,
        "first_loss": round(losses[0], 3),
        "last_loss": round(sum(last_losses) / len(last_losses), 4),
        "right_percent": 100.0 * right / HELD_OUT,
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": hardware(torch.device("cpu"), 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trial", action="store_true", help="20 steps, no rows")
    args = parser.parse_args(argv)
    rows = pd.DataFrame(run(network, 20 if args.trial else STEPS) for network in NETWORKS)
    print(rows.to_string(index=False))
    if not args.trial:
        rows.to_csv(RESULTS, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

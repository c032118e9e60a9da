"""Train the runs of README.md that have no row yet, seed by seed, alternating between the two data sets.

    OMP_NUM_THREADS=1 python -m experiments.collapse.run sweeps/collapse --cifar10 DIR --cifar100 DIR
    python -m experiments.collapse.run sweeps/collapse --cifar10 DIR --device cuda --seeds 5 6 --rows ROWS.csv

DIR has train and test, folders or tars of class/name.png. A finished run is a row of experiments/results/collapse.csv.
If several processes share the seeds, give each its own --rows file.
"""

import argparse
import signal
import sys
from pathlib import Path

import pandas as pd
import torch

from ea_vision.base.devices import choose_device
from ea_vision.base.errors import exit_code
from ea_vision.base.provenance import hardware
from experiments import sweep
from experiments.learning_curves import read_metrics

RESULTS = Path(__file__).resolve().parents[1] / "results" / "collapse.csv"
SEEDS = range(5, 15)
CLASSES = {"cifar10": 10, "cifar100": 100}
WIDTHS = "widths=[16,32,64,64]"
NETWORKS = {
    "cnn": ["--model", "cnn_cifar", "--model-kwargs", WIDTHS],
    "none": ["--model", "conv_transformer_cifar", "--model-kwargs", WIDTHS],
    "none + norm": ["--model", "conv_transformer_cifar", "--model-kwargs", WIDTHS, "qk_norm=true"],
    "EA + norm": ["--model", "ea_conv_transformer_cifar", "--model-kwargs", WIDTHS, "qk_norm=true"],
}
CONTROLS = {  # of controls.md; the later --epochs counts
    "cnn, equal time": [*NETWORKS["cnn"], "--epochs", "5.61", "--eval-epochs", "100"],
    "none, equal time": [*NETWORKS["none"], "--epochs", "4.24", "--eval-epochs", "100"],
    "uniform": [*NETWORKS["none"], "evolution=uniform"],
}
OPTIONS = (
    "--recipe fast --dataset folder --epochs 4 --eval-epochs 4 --amp bfloat16 --channels-last "
    "--workers 0 --test"
).split()


def rows(path: Path = RESULTS) -> pd.DataFrame:
    """Return the runs that have a row."""
    if path.exists():
        return pd.read_csv(path)
    return pd.DataFrame(columns=["data", "network", "seed"])


def make(
    data: str, network: str, seed: int, folder: Path, data_dir: Path, device: torch.device
) -> dict:
    """Train one network, or continue its run, and return its row."""
    command = ["-m", "ea_vision", "train-cifar", *OPTIONS, *(NETWORKS | CONTROLS)[network]]
    where = ["--data-dir", str(data_dir), "--device", device.type]
    run = sweep.train([*command, *where], folder, seed)
    row = {"data": data, "network": network, "seed": seed}
    for key in ("top1", "train_loss", "seconds", "updates", "images"):
        row[key] = run[key]
    row["fingerprint"] = run["data"]
    row["hardware"] = hardware(device, 1)
    return row | maps_of(folder)


def maps_of(folder: Path) -> dict[str, float]:
    """Return the entropy of a run's maps over log N and their largest probability, by layer, after its last epoch."""
    columns = read_metrics(folder)
    return {
        name: columns[name][-1] for name in columns if name.startswith(("entropy_", "largest_"))
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="folder of the run folders")
    parser.add_argument("--cifar10", type=Path, metavar="DIR")
    parser.add_argument("--cifar100", type=Path, metavar="DIR")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="(default: 5 to 14)")
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS | CONTROLS, default=list(NETWORKS)
    )
    parser.add_argument("--rows", type=Path, default=RESULTS, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    signal.signal(signal.SIGTERM, sweep.stop)
    args.runs.mkdir(parents=True, exist_ok=True)
    folders = {"cifar10": args.cifar10, "cifar100": args.cifar100}
    folders = {data: folder for data, folder in folders.items() if folder}
    if not folders:
        parser.error("--cifar10, --cifar100 or both are required")
    for data, folder in folders.items():
        sweep.check_images(folder, CLASSES[data])
    for seed in args.seeds:
        for data, data_dir in folders.items():
            for network in args.networks:
                rows_done = rows(args.rows)
                same = (rows_done["data"] == data) & (rows_done["network"] == network)
                if (same & (rows_done["seed"] == seed)).any():
                    continue
                folder = args.runs / f"{data},{network},{seed}"
                row = make(data, network, seed, folder, data_dir, device)
                table = pd.concat([rows_done, pd.DataFrame([row])])
                table.to_csv(args.rows, index=False)
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

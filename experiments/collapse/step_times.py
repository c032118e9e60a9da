"""Time an update of the networks of controls.md in turns: processor time, one thread, bfloat16, channels last, Muon.

    OMP_NUM_THREADS=1 python -m experiments.collapse.step_times

Writes experiments/results/collapse-times.csv: the median milliseconds of 12 updates of each network, five times.
"""

import sys
import time

import pandas as pd
import timm
import torch

from ea_vision.base.errors import exit_code
from ea_vision.base.provenance import hardware
from ea_vision.models.modes import lay_out
from experiments.benchmark import Steps, interleaved
from experiments.collapse.run import RESULTS

WIDTHS = [16, 32, 64, 64]
NETWORKS = {
    "cnn": ("cnn_cifar", {}),
    "none": ("conv_transformer_cifar", {}),
    "none + norm": ("conv_transformer_cifar", {"qk_norm": True}),
    "uniform": ("conv_transformer_cifar", {"evolution": "uniform"}),
}


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(128, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    calls = {}
    for network, (name, keywords) in NETWORKS.items():
        model = timm.create_model(name, num_classes=100, widths=WIDTHS, **keywords)
        model = lay_out(model, torch.channels_last)
        calls[network] = Steps(model, images, "bfloat16", "muon").train
    rows = []
    for repeat in range(5):
        seconds = interleaved(calls, 12, warm_up=2, clock=time.process_time)
        milliseconds = {network: round(1e3 * value, 1) for network, value in seconds.items()}
        rows.append({"repeat": repeat, **milliseconds, "hardware": hardware(images.device, 1)})
        print(rows[-1], flush=True)
    pd.DataFrame(rows).to_csv(RESULTS.with_name("collapse-times.csv"), index=False)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

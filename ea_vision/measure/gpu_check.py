"""A GPU day: every CUDA path against the reference, then speed, memory and tiles, in at most 25 minutes; one report.

Each stage is a process of its own: one that fails, hangs or takes the driver down says so in the report, and the others
go on. torch, timm and numpy are all that is needed: images are made. The report is a JSON file, written again after
each stage: hardware, versions, and of each stage whether it passed, its seconds, its figures and the end of its output.

Exit code: 0 if every stage passed, 1 if one did not, 77 without a GPU. With --device cpu it is a rehearsal of the
stages themselves: tiny networks, the Triton kernels in Triton's interpreter, four times the seconds a stage. That says
nothing about a GPU.

`gpu-check --kernels` needs no GPU: it shows what the compiler makes of the Triton kernels (`--kernels --help`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ea_vision.base.files import check_output, write_json
from ea_vision.base.provenance import hardware, provenance
from ea_vision.measure.gpu_stages import INTERPRETED, STAGES

NO_GPU = 77


def device_facts() -> dict[str, Any]:
    """Return the GPUs and the versions that matter on them."""
    facts: dict[str, Any] = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    if torch.cuda.is_available():
        facts["cuDNN"] = torch.backends.cudnn.version()
        facts["GPUs"] = [
            {"name": p.name, "capability": f"{p.major}.{p.minor}", "MiB": p.total_memory // 2 ** 20,
             "multiprocessors": p.multi_processor_count}
            for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
        try:
            asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv"]
            facts["nvidia-smi"] = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
        except OSError as error:
            facts["nvidia-smi"] = str(error)
    try:
        import triton
        facts["triton"] = triton.__version__
    except ModuleNotFoundError:
        facts["triton"] = None
    return facts


def run_stage(name: str, device: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Run one stage in a process group of its own, which is killed after `seconds`; what the report says of it."""
    result = folder / f"{name}.json"
    command = [sys.executable, "-m", "ea_vision.measure.gpu_stages", name, "--device", device, "--folder",
               str(folder / name), "--result", str(result)]
    interpret = device == "cpu" and name in INTERPRETED
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]),
                                                                    os.environ.get("PYTHONPATH")]))}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        fault = None
        try:
            code = process.wait(seconds)
            if code not in (0, 1) or code == 1 and not result.exists():
                fault = f"the process ended with exit code {code}"
        except subprocess.TimeoutExpired:
            fault = f"not done after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        tail = output.read()[-4000:]
    figures = json.loads(result.read_text()) if result.exists() else {}
    faults = [f"{what}: {found['fault']}" for what, found in figures.items() if "fault" in found]
    if fault is not None:
        faults.append(fault)
    return {"passed": not faults, "seconds": round(time.monotonic() - began, 1), "faults": faults, "figures": figures,
            "output": tail.splitlines() if faults else []}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal (default: cuda)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE",
                        help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all stages together (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"), metavar="FILE.json",
                        help="the report (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; return the exit code."""
    args = make_parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: no CUDA device found, nothing was run (exit code {NO_GPU}); --device cpu rehearses the "
              "stages", file=sys.stderr)
        return NO_GPU
    check_output(args.output)
    device = torch.device(args.device)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    report: dict[str, Any] = {
        "what": "GPU check" if device.type == "cuda" else "rehearsal on a CPU: nothing was run on a GPU",
        "hardware": hardware(device, count), **provenance(), "devices": device_facts(), "stages": {},
    }
    until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        for name in args.stages:
            left = until - time.monotonic()
            if left < 5:
                over = f"left out: the {args.minutes:g} minutes are over"
                found: dict[str, Any] = {"passed": False, "faults": [over]}
            else:
                limit = STAGES[name][1] * (1 if device.type == "cuda" else 4)
                found = run_stage(name, args.device, Path(folder), min(left, limit))
            report["stages"][name] = found
            write_json(args.output, report)
            print(f"{name}: {'passed' if found['passed'] else 'FAILED'} ({found.get('seconds', 0)} s)", flush=True)
            for fault in found["faults"]:
                print(f"  {' '.join(fault.split())[:300]}", flush=True)
    print(f"Report: {args.output}")
    return 0 if all(found["passed"] for found in report["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

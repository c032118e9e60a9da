"""The GPU day, rehearsed on a CPU: that its stages run and report. What a GPU would show, it cannot know."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ea_vision.base.networks import check_model_name
from ea_vision.engine.run_folder import METRICS, RESULTS
from ea_vision.measure import gpu_check, gpu_stages
from tests.measure.test_reproduce import write_run

CPU = torch.device("cpu")
ALL = os.environ.get("EA_VISION_TEST_ALL") == "1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_and_an_exit_code_of_its_own(capsys, tmp_path):
    report = tmp_path / "report.json"
    assert gpu_check.main(["--output", str(report)]) == gpu_check.NO_GPU == 77
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "no CUDA device found, nothing was run" in told.err
    assert not report.exists()


def test_operators_networks_and_updates_agree_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_stages, "BY_CASE", {"AA": ("cpu",), "windows": ("reference",)})
    cases = {name: case for name, case in gpu_stages.CASES.items() if name in ("AA", "windows")}
    monkeypatch.setattr(gpu_stages, "CASES", cases)
    found = dict(gpu_stages.operators(CPU, True, tmp_path))
    assert set(found) == {"AA, cpu, float32", "windows, reference, float32"}
    for stage in (gpu_stages.networks, gpu_stages.updates):
        found |= dict(stage(CPU, True, tmp_path))
    assert [name for name, figures in found.items() if "fault" in figures] == [], found
    assert {"as they are", "ea_conv_transformer_cifar"} <= set(found)


def test_a_difference_and_an_error_are_faults(tmp_path, monkeypatch):
    case = gpu_stages.CASES["EA"] | {"shape": (2, (2, 3), 4, 3)}
    monkeypatch.setitem(gpu_stages.TOLERANCE, "float32", 0.0)
    found = gpu_stages.compare(case, "float32", "reference", 1, CPU)
    assert "differs by" in found["fault"] and found["error"] < 1e-5
    broken = gpu_stages.attempt(lambda: gpu_stages.compare(case, "float32", "sdpa", 1, CPU))
    assert "sdpa" in broken["fault"] and "Traceback" in broken["traceback"]


def test_dropout_is_checked_by_its_mask():
    case = gpu_stages.CASES["EA, dropout"] | {"shape": (2, (2, 3), 4, 3)}
    assert "fault" not in gpu_stages.compare(case, "float32", "cpu", 1, CPU)


def test_stages_report_their_faults_and_let_the_others_go_on(tmp_path, monkeypatch, capsys):
    """A stage that hangs, one that ends the process, one that passes."""
    calls = iter(("import time; time.sleep(3000)", "import os; os._exit(9)", ""))
    real = subprocess.Popen

    def started(command, **options):
        if "--result" not in command:  # git
            return real(command, **options)
        result = command[command.index("--result") + 1]
        code = next(calls) or f"open({result!r}, 'w').write('{{\"x\": {{\"error\": 0.5}}}}')"
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    limits = {"operators": (None, 0.5), "networks": (None, 200), "updates": (None, 200)}
    monkeypatch.setattr(gpu_check, "STAGES", limits)
    report = tmp_path / "report.json"
    began = time.monotonic()
    assert gpu_check.main(["--device", "cpu", "--output", str(report),
                           "--stages", "operators", "networks", "updates"]) == 1
    assert time.monotonic() - began < 1000
    found = json.loads(report.read_text())
    assert found["stages"]["operators"]["faults"] == ["not done after 2 s"]
    assert found["stages"]["networks"]["faults"] == ["the process ended with exit code 9"]
    assert found["stages"]["updates"]["passed"] and found["stages"]["updates"]["figures"] == {"x": {"error": 0.5}}
    assert "nothing was run on a GPU" in found["what"] and found["versions"]["torch"]
    assert "networks: FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("spoil, fault", [
    (lambda folder: None, None),
    (lambda folder: (folder / RESULTS).unlink(), "the run left no results.json"),
    (lambda folder: (folder / RESULTS).write_text("{}"), "epochs must be of type int or float, got nothing"),
    (lambda folder: (folder / METRICS).write_text("epoch\n1\n"), "is not a metrics file of this trainer"),
])
def test_a_trainer_passes_with_a_whole_run_folder_alone(tmp_path, spoil, fault):
    write_run(tmp_path / "run", 60.0)
    spoil(tmp_path / "run")
    found = gpu_stages.attempt(lambda: gpu_stages.finished([sys.executable, "-c", ""], tmp_path / "run"))
    if fault is None:
        assert (found["epochs"], found["train_loss"]) == (630, 2.0) and "fault" not in found
    else:
        assert fault in found["fault"]


def test_minutes_are_kept(tmp_path, capsys):
    assert gpu_check.main(["--device", "cpu", "--stages", "operators", "--minutes", "0.01",
                           "--output", str(tmp_path / "report.json")]) == 1
    assert "left out: the 0.01 minutes are over" in capsys.readouterr().out


def test_ratios_are_of_networks_that_there_are():
    for models in gpu_stages.RATIOS.values():
        for name in models:
            check_model_name(name)


def test_a_day_takes_at_most_25_minutes():
    assert sum(seconds for _, seconds in gpu_stages.STAGES.values()) <= 25 * 60


def test_made_images_are_a_data_folder(tmp_path):
    gpu_stages.make_images(tmp_path, True)
    assert len(list(Path(tmp_path).glob("train/*/*.png"))) == 64 and len(list(tmp_path.glob("test/*/*.png"))) == 16


@pytest.mark.slow
def test_trainers_need_no_more_than_a_gpu_machine_has():
    """torch, timm and numpy: what only figures, digits and tests need is not imported."""
    code = ("import sys\n"
            "for name in ('matplotlib', 'sklearn', 'scipy', 'hypothesis', 'tensorboard'): sys.modules[name] = None\n"
            "import ea_vision.measure.gpu_check, ea_vision.measure.speed, ea_vision.engine.train_cifar\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not ALL, reason="EA_VISION_TEST_ALL=1 rehearses all stages")
def test_rehearsal_of_all_stages(tmp_path):
    report = tmp_path / "report.json"
    assert gpu_check.main(["--device", "cpu", "--output", str(report)]) == 0, report.read_text()
    assert set(json.loads(report.read_text())["stages"]) == set(gpu_stages.STAGES)

"""Every command by every name it has: of `ea-vision`, of older `python -m`, of the scripts of a checkout."""
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ea_vision.__main__ import ASIDE, COMMANDS, GROUPS, PARTS, UNLISTED, main

ROOT = Path(__file__).resolve().parents[1]
OLDER = {"summary": "summary", "benchmark": "benchmark", "memory": "memory", "probe": "probe", "timm": "timm",
         "data.benchmark": "loaders"}
SCRIPTS = {"train_cifar.py": "train-cifar", "train_imagenet.py": "train-imagenet",
           **{f"visualize/{name}.py": name for name in (
               "heatmap", "strip", "matrix", "rollout", "statistics", "match", "explore")}}


@pytest.fixture
def helped(monkeypatch, capsys):
    """The --help of what `call` runs, under a name on the command line; it must end well and say nothing else."""
    def of(name: str, call) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as left:
            sys.exit(call())
        said = capsys.readouterr()
        assert left.value.code in (0, None) and not said.err
        return said.out

    return of


def test_the_overview_has_a_line_for_each_command(helped):
    lines = helped("ea-vision", main).splitlines()
    for title, commands in GROUPS.items():
        place = lines.index(f"{title}:")
        assert [line.split()[0] for line in lines[place + 1:place + 1 + len(commands)]] == list(commands)
    assert max(map(len, lines)) <= 100 and len(COMMANDS) <= 25


@pytest.mark.parametrize("start", [["-m", "ea_vision"], ["-m", "ea_vision", "--help"]])
def test_the_overview_needs_no_torch(start):
    """Nor anything else that takes long to import."""
    done = subprocess.run([sys.executable, "-X", "importtime", *start], capture_output=True, text=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "  heatmap " in done.stdout and "ea_vision.base.errors" in imported
    assert not imported & {"torch", "timm", "matplotlib", "numpy", "PIL"}


def test_the_console_script_lists_without_torch(tmp_path):
    """pip writes such a file."""
    script = tmp_path / "ea-vision"
    script.write_text("import sys\nfrom ea_vision.__main__ import main\ncode = main()\n"
                      "sys.exit(code or ('torch' in sys.modules))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ | {
        "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "  heatmap " in done.stdout


def test_no_command_or_a_wrong_one(monkeypatch, capsys):
    assert main([]) == 0 and "heatmap" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["ea-vision", "heatmaps", "photo.jpg"])
    assert main() == 2
    assert capsys.readouterr().err == "error: unknown command 'heatmaps'; did you mean heatmap?\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_itself(command, helped):
    text = helped("ea-vision", lambda: main([command, "--help"]))
    assert f"ea-vision {command} " in " ".join(text.split())
    if command != "timm":  # which shows whose scripts it runs
        assert text.startswith(f"usage: ea-vision {command} ")


@pytest.mark.parametrize("command", [*UNLISTED, *PARTS, *ASIDE])
def test_unlisted_names_and_parts_answer(command, helped):
    text = helped("ea-vision", lambda: main([*command.split(), "--help"]))
    assert text.startswith(f"usage: ea-vision {UNLISTED.get(command, command)} ")
    for part in PARTS:
        listed, option = part.split()
        assert option in helped("ea-vision", lambda listed=listed: main([listed, "--help"]))


def test_contracts_are_commands():
    """Of release 0.2."""
    contracts = ("train-cifar train-imagenet train-detection sweep heatmap strip matrix rollout statistics animation "
                 "explore faithfulness probe predict detect models reproduce summary benchmark memory write-ffcv "
                 "loaders export gpu-check timm").split()
    assert set(contracts) <= {*COMMANDS, *UNLISTED, *ASIDE}


@pytest.mark.parametrize("older", OLDER)
def test_older_names_of_modules(older, helped):
    text = helped(older, lambda: runpy.run_module(f"ea_vision.{older}", run_name="__main__", alter_sys=True))
    assert text == helped("ea-vision", lambda: main([OLDER[older], "--help"]))


@pytest.mark.parametrize("module", ["data.write_ffcv"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_modules_that_kept_their_names(module, helped):
    text = helped(module, lambda: runpy.run_module(f"ea_vision.{module}", run_name="__main__", alter_sys=True))
    assert "examples:" in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_of_a_checkout_take_the_commands_options(script, helped):
    """They show their own name, and otherwise what the command shows."""
    name = Path(script).name
    own = helped(f"/checkout/{script}", lambda: runpy.run_path(str(ROOT / script), run_name="__main__"))
    command = helped("ea-vision", lambda: main([SCRIPTS[script], "--help"]))
    assert own.startswith(f"usage: {name} ")
    options = [re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE) for text in (own, command)]
    assert options[0] == options[1] and len(options[0]) > 3


@pytest.mark.parametrize("start", [["-m", "ea_vision", "models"], *([script] for script in SCRIPTS)])
def test_ctrl_c_while_torch_is_loaded(start, tmp_path):
    """One line and the shell's exit code, from wherever the scripts are started."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "scripts").symlink_to(ROOT)
    for folder in (ROOT, tmp_path / "scripts"):
        there = [str(folder / word) if word.endswith(".py") else word for word in start]
        done = subprocess.run([sys.executable, *there], capture_output=True, text=True, cwd=folder, env=os.environ | {
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_a_module_of_your_own_that_is_not_found_is_one_line():
    done = subprocess.run([sys.executable, "-m", "ea_vision", "models"], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"EA_VISION_IMPORT": "no_such.module"})
    assert (done.returncode, done.stderr) == (2, "error: EA_VISION_IMPORT must name modules that can be imported, got "
                                                 "'no_such.module': No module named 'no_such'\n")


def test_every_script_is_tested():
    scripts = {str(path.relative_to(ROOT)) for folder in (".", "visualize") for path in ROOT.glob(f"{folder}/*.py")}
    assert scripts <= set(SCRIPTS)

"""Every command, of `ea-vision` and of the scripts of a checkout; the errors that all of them share."""

import os
import re
import runpy
import sys

import pytest

import ea_vision
from ea_vision.__main__ import COMMANDS, main
from tests.engine.runner import run_world
from tests.process import ROOT, python
from tests.slow import slow_but

CONTRACT = set(  # what scripts of others may call
    "train-cifar train-imagenet train-detection timm write-ffcv predict export models "
    "probe heatmap strip statistics explore".split()
)
SCRIPTS = sorted([*ROOT.glob("*.py"), *ROOT.glob("visualize/*.py")])
SCRIPTS = [path.relative_to(ROOT) for path in SCRIPTS]


@pytest.fixture
def helped(monkeypatch, capsys):
    """Return the --help of the command that `call` runs under a given name; it must exit with 0 and print no errors."""

    def of(name, call):
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as left:
            sys.exit(call())
        captured = capsys.readouterr()
        assert left.value.code in (0, None)
        assert not captured.err
        return captured.out

    return of


def test_the_overview_has_a_line_for_each_command(helped):
    text = helped("ea-vision", main)
    listed = re.findall(r"^  ([a-z-]+)  ", text.partition("commands:")[2], re.MULTILINE)
    examples = re.findall(r"^  ea-vision ([a-z-]+)", text, re.MULTILINE)
    assert CONTRACT <= set(listed)
    assert CONTRACT.union(examples) <= set(COMMANDS)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    "words, shown",
    [
        ([], "  heatmap "),
        (["--help"], "  heatmap "),
        (["--version"], f"ea-vision {ea_vision.__version__}\n"),
    ],
)
def test_the_overview_and_the_version_need_no_torch(words, shown, tmp_path):
    """Nor other slow imports; both with `python -m` and with the script that pip installs."""
    script = tmp_path / "ea-vision"
    code = "import sys\nfrom ea_vision.__main__ import main\nsys.exit(main())\n"
    script.write_text(code, encoding="utf-8")
    for start in (["-m", "ea_vision"], [str(script)]):
        done = python("-X", "importtime", *start, *words, PYTHONPATH=str(ROOT))
        imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
        assert done.returncode == 0
        assert shown in done.stdout
        assert "ea_vision.base.errors" in imported
        assert not imported & {"torch", "timm", "matplotlib", "numpy", "PIL"}


def test_a_wrong_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ea-vision", "heatmaps", "photo.jpg"])
    assert main() == 2
    assert capsys.readouterr().err == "error: unknown command 'heatmaps'; did you mean heatmap?\n"
    for command, flag, meant in (
        ("heatmap a.png --laeyrs=1", "--laeyrs=1", "--layers"),
        ("predict resnet18 a.png --tpo 3", "--tpo", "--top"),
    ):
        assert main(command.split()) == 2
        captured = capsys.readouterr().err
        assert captured.startswith(f"error: unknown argument '{flag}'; did you mean {meant}")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_itself(command, helped):
    text = helped("ea-vision", lambda: main([command, "--help"]))
    assert f"ea-vision {command} " in " ".join(text.split())
    if command != "timm":  # which shows whose scripts it runs
        assert text.startswith(f"usage: ea-vision {command} ")


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_scripts_of_a_checkout_take_the_commands_options(script, helped):
    """Their help shows the script's name, and otherwise equals the command's help, if there is such a command."""

    def options(text):
        return re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)

    path = str(ROOT / script)
    options_shown = helped(f"/checkout/{script}", lambda: runpy.run_path(path, run_name="__main__"))
    assert options_shown.startswith(f"usage: {script.name} ")
    name = script.stem.replace("_", "-")
    if name in COMMANDS:
        command = helped("ea-vision", lambda: main([name, "--help"]))
        assert options(options_shown) == options(command)
        assert len(options(options_shown)) > 3


def test_ctrl_c_while_torch_is_loaded(tmp_path):
    """One line and the shell's exit code."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    done = python("-m", "ea_vision", "models", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


NO_MODULE = "must name modules that can be imported, got "
NONSENSE = [
    ("EA_VISION_IMPORT", "no_such.module", NO_MODULE),
    ("EA_VISION_IMPORT", "..x", NO_MODULE),
    ("EA_VISION_IMPORT", "os.path.no", NO_MODULE),
    ("EA_VISION_IMPLEMENTATION", "fast", "must be one of "),
]


@pytest.mark.parametrize("nonsense", slow_but(NONSENSE[:1], NONSENSE), ids=str)
def test_nonsense_in_the_environment_is_one_line(nonsense):
    name, value, said = nonsense
    done = python("-m", "ea_vision", "models", **{name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {name} {said}")
    assert done.stderr.count("\n") == 1
    assert repr(value) in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"COLUMNS": "20"},
        {"HOME": "/proc/none", "MPLCONFIGDIR": "", "XDG_CACHE_HOME": ""},
    ],
    ids=str,
)
def test_odd_environments(env, tmp_path):
    photo = ROOT / "docs" / "cat.jpg"
    picture = tmp_path / "h.png"
    for line in (
        f"predict ea_conv_transformer_cifar {photo}",
        f"heatmap --layers 1 -o {picture} {photo}",
        "export --help",
    ):
        done = python("-m", "ea_vision", *line.split(), **env)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert picture.stat().st_size > 1000


def draw_at_last(_):
    before = "matplotlib" in sys.modules
    return before or not ea_vision.visualize.plot_heatmap


def test_figures_are_a_name_of_the_package_that_loads_matplotlib_at_its_first_use(tmp_path):
    """In a process that has imported the trainers."""
    log = tmp_path / "log"
    assert run_world(1, [], log, main=draw_at_last) == [0], log.read_text(encoding="utf-8")

"""`ea-vision predict` on files, folders and standard input gives the same classes as timm's own transform."""

import json
import os
import shutil
import sys

import pytest
import timm
import torch
from PIL import Image

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import exit_code
from ea_vision.predict import main
from tests.data.photos import picture
from tests.engine.runner import error_of

MODEL = "ea_conv_transformer_cifar"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three images of 32 x 32 pixels, one of them in a folder below."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "deep").mkdir()
    for seed, name in enumerate(("a.png", "b.png", "deep/c.png")):
        picture(seed, (32, 32)).save(folder / name)
    return folder


def expected(path, top):
    """As in timm's README: create_transform, softmax, topk."""
    model = timm.create_model(MODEL, pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    image = Image.open(path).convert("RGB")
    with torch.inference_mode():
        [logits] = model(transform(image)[None])
    values, indices = logits.softmax(-1).topk(top)
    names = [model.pretrained_cfg["label_names"][i] for i in indices.tolist()]
    return dict(zip(names, values.tolist(), strict=True))


def test_classes_are_those_of_timm_s_own_steps(photos, capsys):
    assert main(f"{MODEL} {photos} --json - --device cpu".split()) == 0
    rows = json.loads(capsys.readouterr().out)
    names = ("a.png", "b.png", "deep/c.png")
    assert [row["image"] for row in rows] == [str(photos / name) for name in names]
    for row in rows:
        shares = {one["name"]: one["probability"] for one in row["classes"]}
        expected_rows = expected(row["image"], 5)
        assert list(shares) == list(expected_rows)
        assert shares == pytest.approx(expected_rows, abs=2e-6)


def test_a_table_in_the_order_of_the_paths(photos, capsys):
    assert main([MODEL, str(photos / "b.png"), str(photos / "a.png"), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    likeliest = expected(photos / "b.png", 2)
    shares = [f"{name} {100 * share:.1f}%" for name, share in likeliest.items()]
    assert lines[0] == f"{photos / 'b.png'}: {', '.join(shares)}"
    assert len(lines) == 2


def test_a_broken_image_is_named_and_the_others_are_classified(photos, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    output = tmp_path / "new" / "found.json"
    broken.write_bytes((photos / "a.png").read_bytes()[:60])
    assert main(f"{MODEL} {broken} {photos}/a.png --json {output}".split()) == 1
    assert capsys.readouterr().err.startswith(f"error: image {broken} cannot be read: ")
    bad, good = json.loads(output.read_text(encoding="utf-8"))
    assert bad["classes"] == []
    assert str(broken) in bad["error"]
    assert "error" not in good
    assert len(good["classes"]) == 5


def test_names_that_are_not_utf8_stop_nothing(photos, tmp_path, capfd):
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    strange = os.fsencode(folder) + b"/caf\xe9.png"
    os.rename(os.fsencode(folder / "a.png"), strange)
    output = tmp_path / "found.json"
    command = [MODEL, str(folder), os.fsdecode(strange), "--json", str(output)]
    before = sys.stdout.errors
    sys.stdout.reconfigure(errors="strict")
    assert exit_code(lambda: main(command)) == 0
    sys.stdout.reconfigure(errors=before)
    printed = capfd.readouterr().out
    assert printed.count("caf\\udce9.png: ") == 2
    assert "b.png: " in printed
    rows = json.loads(output.read_text(encoding="utf-8"))
    names = [os.fsencode(row["image"]) for row in rows]
    assert names.count(strange) == 2


@pytest.mark.parametrize(
    "words, message",
    [
        ([MODEL, "/nowhere.png"], "does not exist"),
        ([MODEL, "n" * 300], "does not exist"),
        (["ea_conv_transformer_cifr", "digits#0"], "did you mean"),
        (["m" * 300, "digits#0"], "unknown model"),
        (["resnet18_cifar", "digits#0"], "resnet18_cifar has no weights"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert message in error_of(main, words, capsys)

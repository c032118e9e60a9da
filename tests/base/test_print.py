"""Letters that matplotlib's own fonts lack are drawn by an installed font that has them.

Private name: the installed fonts are looked up once a process.
"""

import warnings

import matplotlib
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from ea_vision.base import print as texts
from ea_vision.base.figures import figure_bytes
from ea_vision.detection.draw import draw_detections
from ea_vision.engine.evaluate import Evaluation
from ea_vision.engine.pictures import confusion_png
from ea_vision.visualize import plot_heatmap
from tests.recorder.networks import images, tiny

CAT = "\N{CJK UNIFIED IDEOGRAPH-732B}"


@pytest.fixture
def font(tmp_path, monkeypatch):
    """Install a font that has the Chinese letter for cat, digits, a dot and a space, all of them squares."""
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for corner in ((100, 800), (900, 800), (900, 0)):
        pen.lineTo(corner)
    pen.closePath()
    square = pen.glyph()
    glyphs = {ord(letter): f"uni{ord(letter):04X}" for letter in f"{CAT} .0123456789"}
    names = [".notdef", *glyphs.values()]
    builder = FontBuilder(1000)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap(glyphs)
    builder.setupGlyf(dict.fromkeys(names, square))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 100)))
    builder.setupHorizontalHeader(ascent=880, descent=-120)
    builder.setupNameTable({"familyName": "Noto Sans CJK SC", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    path = tmp_path / "font.ttf"
    builder.save(path)
    monkeypatch.setattr(fontManager, "ttflist", [*fontManager.ttflist])
    fontManager.addfont(path)
    texts._installed.cache_clear()
    yield str(path)
    texts._installed.cache_clear()


def test_pictures_draw_names_in_chinese(font):
    """Without a font that has a letter, matplotlib warns and draws a box."""
    confusion = torch.eye(2, dtype=torch.float64)
    result = Evaluation(2, 100.0, 100.0, 0.1, confusion, torch.empty(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert confusion_png(result, [CAT, "dog"], "net").startswith(b"\x89PNG")
        figure = plot_heatmap({CAT: tiny()}, images(32, 32, 1)[0].clamp(0, 1), layers=[1])
        for suffix in (".png", ".pdf"):
            figure_bytes(figure, suffix)


def test_without_the_users_font_matplotlibs_own_draws_what_it_can(font):
    """The font of Chinese letters, which is installed, has no Latin ones."""
    with (
        matplotlib.rc_context({"font.family": "not installed"}),
        matplotlib.rc_context(texts.text_settings()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        figure = Figure()
        figure.text(0.5, 0.5, f"cat {CAT}")
        assert figure_bytes(figure, ".png").startswith(b"\x89PNG")


def test_names_of_detections_are_in_a_font_that_has_their_letters(font):
    assert texts.font_file(f"{CAT} 0.93") == font
    assert texts.font_file("cat 0.93").endswith("DejaVuSans-Bold.ttf")
    assert texts.font_file(f"{CAT} cat").endswith("DejaVuSans-Bold.ttf")
    image = torch.zeros(3, 640, 640, dtype=torch.uint8)
    detections = {
        "boxes": torch.tensor([[300.0, 300.0, 600.0, 600.0]]),
        "scores": torch.tensor([0.93]),
        "labels": torch.tensor([0]),
    }
    drawn = [
        draw_detections(image, detections, [name])
        for name in (CAT, "\N{CJK UNIFIED IDEOGRAPH-72AC}")
    ]
    assert not torch.equal(*drawn)

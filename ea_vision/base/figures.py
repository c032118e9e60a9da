"""Figures as bytes, their widths, and the colours of their lines. Importing this does not import matplotlib."""

import argparse
import io
import math
from collections.abc import Sequence

from ea_vision.base.errors import UsageError

COLORS = ("#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#009E73", "#F0E442")  # Okabe and Ito
FORMATS = (".png", ".svg", ".pdf")
MOST_DPI, MOST_PIXELS = 2400, 250_000_000
PAGE = 6.75  # inches: the width of a figure that is not asked for another one, if it has enough to show
NARROWEST, WIDEST = 2.5, 40.0  # inches


def dpi(text: str) -> int:
    """Return the option --dpi as a number, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_DPI:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to {MOST_DPI} required, got {text[:20]!r}")
    return int(text)


def inches(text: str) -> float:
    """Return the option --width as a number, for argparse."""
    try:
        return check_width(float(text)) if math.isfinite(float(text)) else check_width(-1.0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a width in inches from {NARROWEST} to {WIDEST:g} required, got {text!r}"
                                         ) from error


def check_width(width: float | None) -> float | None:
    """Raise UsageError for a width that no text fits into."""
    if width is not None and not NARROWEST <= width <= WIDEST:
        raise UsageError(f"width must lie between {NARROWEST} and {WIDEST:g} inches, got {width:g}")
    return width


def figure_bytes(figure, suffix: str = ".png", dpi: int = 200) -> bytes:
    """Return the figure in the format of one of FORMATS; text stays text, which can be found.

    Raises:
        UsageError: more than MOST_PIXELS.
    """
    import matplotlib

    width, height = (side * dpi for side in figure.get_size_inches())
    if suffix == ".png" and (width * height > MOST_PIXELS or max(width, height) >= 2**16):
        raise UsageError(f"a picture must have at most {MOST_PIXELS / 1e6:g} megapixels and 65535 pixels a side, got "
                         f"{width:.0f}x{height:.0f} at {dpi} dots per inch: ask for fewer (--dpi)")

    data = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(data, format=suffix.removeprefix("."), dpi=dpi)
    return data.getvalue()


def color_cycle() -> Sequence[str]:
    """Colours of lines: the user's, and where rcParams has matplotlib's, those that the colour-blind can tell apart."""
    import matplotlib

    cycle = matplotlib.rcParams["axes.prop_cycle"]
    own = cycle != matplotlib.rcParamsDefault["axes.prop_cycle"] and "color" in cycle.keys
    return cycle.by_key()["color"] if own else COLORS

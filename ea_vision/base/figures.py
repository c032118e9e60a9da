"""Figures as bytes, their widths, and the colours of their lines. Importing this does not import matplotlib."""

import io
from collections.abc import Sequence
from numbers import Real

from ea_vision.base.errors import UsageError

# Okabe and Ito
COLORS = ("#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#009E73", "#F0E442")
FORMATS = (".png", ".svg", ".pdf")
MOST_PIXELS = 250_000_000
PAGE = 6.75  # inches: the default width of a figure that has enough to show
NARROWEST = 2.5  # inches
WIDEST = 40.0


def check_width(width: float | None) -> float | None:
    """Return a width in inches, or None; raise UsageError if it is narrower than NARROWEST or wider than WIDEST."""
    if width is None or isinstance(width, Real) and NARROWEST <= width <= WIDEST:
        return width
    raise UsageError(f"width must lie between {NARROWEST} and {WIDEST:g} inches, got {width!r}")


def figure_bytes(figure, suffix: str = ".png", dpi: int = 200) -> bytes:
    """Return the figure in the format of one of FORMATS.

    Raises:
        UsageError: more than MOST_PIXELS; also for SVG and PDF, which may contain pixels.
    """
    width, height = figure.get_size_inches() * dpi
    if width * height > MOST_PIXELS or max(width, height) >= 2**16:
        raise UsageError(
            f"a picture must have at most {MOST_PIXELS / 1e6:g} megapixels and 65535 pixels per side, got "
            f"{width:.0f}x{height:.0f} at {dpi} dots per inch: ask for fewer (--dpi)"
        )
    data = io.BytesIO()
    figure.savefig(data, format=suffix.removeprefix("."), dpi=dpi)
    return data.getvalue()


def color_cycle() -> Sequence[str]:
    """Return colours of lines: those of the user's rcParams or, if these are matplotlib's defaults, COLORS, which the
    colour-blind can distinguish."""
    import matplotlib

    cycle = matplotlib.rcParams["axes.prop_cycle"]
    is_set = cycle != matplotlib.rcParamsDefault["axes.prop_cycle"] and "color" in cycle.keys
    return cycle.by_key()["color"] if is_set else COLORS

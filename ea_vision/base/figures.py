"""Figures as bytes, and the colours of their lines."""

import io
from collections.abc import Sequence

COLORS = ("#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#009E73", "#F0E442")  # Okabe and Ito
FORMATS = (".png", ".svg", ".pdf")


def figure_bytes(figure, suffix: str = ".png", dpi: int = 120) -> bytes:
    """The figure in the format of one of FORMATS; text stays text, which can be found."""
    import matplotlib

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


def font_points(size: str) -> float:
    """Points of one of matplotlib's sizes, such as "small"."""
    from matplotlib.font_manager import FontProperties

    return FontProperties(size=size).get_size_in_points()

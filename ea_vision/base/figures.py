"""Figures as bytes."""

import io


def figure_bytes(figure) -> bytes:
    """The figure as PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()

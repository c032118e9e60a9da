"""Checks of pages: a section must contain certain numbers, in any wording."""

import re
from pathlib import Path

import pandas as pd

from experiments import sensitivity

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"


def table(name, **options):
    """Return a file of experiments/results, or of an absolute path."""
    return pd.read_csv(RESULTS / name, **options)


def last_row(name):
    """Return the last epoch's row of a run's metrics.csv in experiments/results."""
    return table(name).iloc[-1]


def top1_of(name, *data):
    """Return top-1 by seed and variant of a file of runs in experiments/results, perhaps of one of its data sets."""
    return sensitivity.top1_of(RESULTS / name, *data)


def section(page, heading=""):
    """Return a page's text under a heading of any level, up to the next one of that level; "": the whole page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if not heading:
        return text
    for level in ("## ", "### "):
        before, found, rest = f"\n{text}".partition(f"\n{level}{heading}\n")
        if found:
            of_level, _, _ = rest.partition(f"\n{level}")
            return of_level.partition("\n## ")[0]
    raise AssertionError(f"{page} has no section {heading!r}")


def rows_of(page, pattern, heading=""):
    """Return the matches of a pattern in the lines of a section."""
    return re.findall(f"^{pattern}$", section(page, heading), re.M)


def shown(numbers):
    """Return text as it is and numbers with two digits."""
    return [number if isinstance(number, str) else f"{number:.2f}" for number in numbers]


def page_says(page, heading, *numbers):
    """Check that the section under `heading` has these numbers; a minus sign may be a hyphen, and a number has two
    digits after its point."""
    text = plain_text(section(page, heading))
    missing = [number for number in shown(numbers) if plain_text(number) not in text]
    assert missing == [], f"{page}, {heading}: {missing}"


def plain_text(text):
    """Return a text in one line, with hyphens for minus signs and nothing bold."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("**", "")
    return " ".join(text.split())


def span(values, digits=2):
    """Return the smallest and the largest: "0.12 to 0.34"."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

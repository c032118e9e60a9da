"""Durations as people read them: 12 s, 3.5 min, 2.8 hours."""

MIB = 2**20
UNITS = (("s", 1.0, 100), ("min", 60.0, 100), ("hours", 3600.0, 48))  # name, seconds, largest count


def duration(seconds: float) -> str:
    """Write a duration in seconds up to 100 s, minutes up to 100 min, hours up to 48 hours, else in days."""
    for unit, length, limit in UNITS:
        if seconds / length < limit:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds / 86400:.3g} days"

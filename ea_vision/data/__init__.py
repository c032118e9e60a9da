"""What reads images. `cifar` decodes small images once; `on_device` draws augmented batches from them, and
from `on_disk`'s."""
from pathlib import Path

__path__.append(str(Path(__file__).parents[1] / "aliases" / "data"))  # older names of `python -m`

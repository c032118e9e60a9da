"""What reads images. `cifar` decodes small images once; `on_device` draws augmented batches from them, and
from `on_disk`'s."""

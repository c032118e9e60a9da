"""What reads images. `cifar` decodes small images once; `on_device` draws augmented batches from them."""

"""Image sources, and the loaders that make batches of them.

`small_images` decodes a whole data set once (digits, CIFAR, folders, tars); `on_device` draws augmented batches from
it, with `augment`. `imagenet` decodes image files as they are needed, `ffcv` the .beton files that `write_ffcv` writes.
They share `batches` (orders, and the shares of processes), `splits` (where the training and evaluation images of a data
folder lie), `image_files` (which files are images, of which class, and what decodes them) and `bad_images`.
"""

"""Image sources, and the loaders that make batches of them.

`small_images` decodes a whole data set once (digits, CIFAR, folders, tars); `on_device` draws augmented batches from
it, with `augment`. `imagenet` decodes images as they are needed: those of `image_files` (folders, `tars`, WebDataset's
shards), of `hub_images` (Hugging Face's) and of `beton`, the files that `write_ffcv` writes and whose training
images `ffcv` decodes.
They share `batches` (orders, and the shares of processes), `splits` (where the training and evaluation images of a data
folder lie), `image_names` (which names are images' and which are hidden) and `bad_images`.
"""

"""`python -m ea_vision.data.benchmark`, the older name of `ea-vision benchmark --loaders`."""
import sys

from ea_vision.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["loaders", *sys.argv[1:]]))

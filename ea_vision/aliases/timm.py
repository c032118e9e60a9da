"""`python -m ea_vision.timm`, the older name of `ea-vision timm`."""
import sys

from ea_vision.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["timm", *sys.argv[1:]]))

"""`python -m ea_vision.benchmark` is `ea-vision benchmark`."""
import sys

from ea_vision.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))

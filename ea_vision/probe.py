"""`python -m ea_vision.probe` is `ea-vision probe`."""
import sys

from ea_vision.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["probe", *sys.argv[1:]]))

"""`python -m ea_vision.summary` is `ea-vision summary`."""
import sys

from ea_vision.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["summary", *sys.argv[1:]]))

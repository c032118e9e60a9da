"""`python -m ea_vision.memory` is `ea-vision memory`."""
import sys

from ea_vision.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["memory", *sys.argv[1:]]))

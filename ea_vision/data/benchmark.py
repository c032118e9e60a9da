"""`python -m ea_vision.data.benchmark` is `ea-vision loaders`, which lives on a higher floor."""
import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "loaders")
    runpy.run_module("ea_vision", run_name="__main__")

"""Studies over several runs: train settings side by side, and say whether they differ.

    sweep      train once per setting and seed, and draw the curve over the settings
    evidence   read the runs of a sweep and test whether its variants differ
"""

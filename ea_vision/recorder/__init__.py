"""The recorder: attention maps of any transformer, what can be computed from them, and the probe."""

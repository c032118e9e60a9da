"""Measurements of networks and loaders: parameters and arithmetic, speed, memory, images per second."""

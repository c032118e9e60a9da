"""Recipes: one YAML file per published row, each opening with its command, cost and expected accuracy."""

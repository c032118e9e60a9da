"""From a model's name, a run or a file to a network with its weights and the preparation of its images."""

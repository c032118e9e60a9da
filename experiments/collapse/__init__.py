"""Was attention's deficit the collapse of its maps? Protocol, runs and analysis."""

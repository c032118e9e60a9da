"""Does evolving attention help on SST? Question and runs."""

"""One run, from its configuration to its summary, in its folder."""

"""What computes: the oracle, the fast engine, and the simulation that plays the two halves of an algorithm."""

"""Rounds: the exchange between the two halves of a method, and the evaluation of all clients."""

"""What the servers compute: attention weights, selections, common descents and robust means, as pure functions.

Tensors in, tensors out: no state, no change to an argument, and every decision (a threshold, a ranking, a weight) taken
in float64 whatever the rows' type.
"""

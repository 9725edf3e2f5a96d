"""What computes: the oracle, the batched engine, their schedules and nets."""

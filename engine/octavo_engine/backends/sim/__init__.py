"""The simulator: true scheduling, modelled step time, seeded tokens."""

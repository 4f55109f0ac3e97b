"""The simulator study: one workload, many engines, each routing policy, in virtual time."""

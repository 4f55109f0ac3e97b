"""What executes a step: native (csrc), torch (the reference), sim (modelled time)."""

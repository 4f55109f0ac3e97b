"""The whole platform as processes of one machine, by the operator's own spec and plan."""

"""The kinds, names and labels of the objects that the operator reads and writes."""

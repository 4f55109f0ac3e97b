"""Grammars that answers must keep to: checked at the door, compiled beside the steps, followed
token by token."""

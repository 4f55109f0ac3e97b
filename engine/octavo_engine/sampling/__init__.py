"""From logits to a token: parameters laid out in rows, one kernel call a step."""

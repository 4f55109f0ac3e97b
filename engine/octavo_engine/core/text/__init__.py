"""From the core's tokens to text: detokenised, cut at stop strings, delivered to its readers."""

"""The engines there are: what is known of each, and how they are found."""

"""Speech to text beside the model: samples, spectrograms, and what tokens say of times."""

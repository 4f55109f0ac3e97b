"""What was asked and how far it is: requests, sequences, batches, outputs. Values, no behaviour."""

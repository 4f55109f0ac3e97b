"""Files that clients leave here, and batches of requests that are answered out of them."""

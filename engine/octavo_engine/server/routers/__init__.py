"""What routers receive: load and residency, pushed; labels of prefixes; token ids of streams."""

"""Where KV blocks stay that left the pool: host memory and disk, and what fetching them costs."""

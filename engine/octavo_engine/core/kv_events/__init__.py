"""What enters and leaves the prefix cache, published as events and as labels for routers."""

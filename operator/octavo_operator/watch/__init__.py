"""From watch events to the cache of objects and the queue of keys to reconcile."""

"""HTTP under every endpoint: connections, bodies, errors, keys, TLS, server-sent events."""

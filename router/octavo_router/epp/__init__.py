"""The endpoint picker: the router's decisions, served to a gateway over Envoy's ext_proc."""

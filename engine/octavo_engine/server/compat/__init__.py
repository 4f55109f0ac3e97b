"""Endpoints and fields of other servers, served or refused under their own names."""

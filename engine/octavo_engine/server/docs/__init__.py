"""/openapi.json, /docs, and the pages of docs/ made from the table of routes."""

"""`/docs` and `/openapi.json` of the router: its own routes and those that it passes to engines."""

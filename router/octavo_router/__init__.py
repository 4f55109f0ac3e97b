"""The router: sends each request to the engine that holds its prefix and has room.

Raw asyncio on uvloop, a residency index in route keys, policies as small classes; `docs/router.md`
says what it does and `docs/architecture.md` how it fits. It imports `octavo_engine.protocol` and
nothing else of the engine.
"""

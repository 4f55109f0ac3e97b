"""The router: sends each request to the engine that holds its prefix and has room.

Not built yet. It will be raw asyncio on uvloop with httptools, a residency index in route keys, and
policies as small classes; `docs/architecture.md` says how it fits. It may import
`octavo_engine.protocol` and nothing else of the engine.
"""

"""Paths, ports and header names that engine, router and operator share."""

ENGINE_PORT = 8000
ENGINE_ADMIN_PORT = 8001  # where one listens for administrators, in pods
ROUTER_PORT = 8080
OPERATOR_PORT = 8090
KV_PORT = 14579  # of engines that serve KV blocks to others
LEADER_PORT = 29501  # of engines that are several pods: for their workers

# on the engine
STREAM_PATH = "/octavo/v1/stream"  # load and residency, pushed: protocol.stream
DRAIN_PATH = "/octavo/v1/drain"

# on the router
STATE_PATH = "/octavo/v1/state"  # pools and endpoints as this replica sees them: protocol.state

# headers between client and router
REQUEST_ID_HEADER = "x-request-id"
EXPLAIN_HEADER = "x-octavo-explain"
SERVED_BY_HEADER = "x-served-by"
TIMEOUT_HEADER = "x-octavo-timeout-ms"  # how long the client will wait for the whole answer

# Headers of an engine's answer that a client gets through a router too, which drops x-octavo-*. Of
# a JSON schema: keywords that were not enforced while it was generated, and whether the answer is
# valid nevertheless.
SCHEMA_LEFT_OVER_HEADER = "x-schema-not-enforced"
SCHEMA_VALID_HEADER = "x-schema-valid"
# Fields of the body that its endpoint does not know, with the nearest names that it does.
UNKNOWN_FIELDS_HEADER = "x-unknown-fields"

# headers between router and engine; a client's are stripped
# A client's: how many bytes of its stream stand before the request that continues it.
CONTINUE_HEADER = "x-octavo-continue"
STREAM_HEADER = "x-octavo-stream"  # "tokens": each SSE event carries the token ids behind its text
RESUME_HEADER = "x-octavo-resume"  # "1": the body is a resume frame: protocol.resume
POD_UID_HEADER = "x-octavo-pod-uid"  # whom the router means; another pod answers 421
PLACE_HEADER = "x-octavo-place"  # how ids of what the engine keeps begin, to be found again
PLACE_DIGITS = 8  # hexadecimal
OWNER_HEADER = "x-octavo-owner"  # whose it is what the engine keeps, among the router's tenants
INTERNAL_HEADERS = frozenset(
    {STREAM_HEADER, RESUME_HEADER, POD_UID_HEADER, PLACE_HEADER, OWNER_HEADER}
)

"""Paths, ports and header names that engine, router and operator share."""

ENGINE_PORT = 8000
ROUTER_PORT = 8080
EPP_PORT = 9002
OPERATOR_PORT = 8090

STREAM_PATH = "/octavo/v1/stream"
DRAIN_PATH = "/octavo/v1/drain"

REQUEST_ID_HEADER = "x-request-id"
RESUME_HEADER = "x-octavo-resume"
STREAM_HEADER = "x-octavo-stream"
EXPLAIN_HEADER = "x-octavo-explain"

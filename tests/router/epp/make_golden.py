"""Makes golden.json with published bindings of Envoy's API; run it where `envoy-data-plane` and
grpcio are installed (a virtual environment of their own: the tests need neither).

    python tests/router/epp/make_golden.py > tests/router/epp/golden.json

What a gateway sends, and what it must be sent, as hexadecimal bytes by name.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any


def make() -> dict[str, dict[str, str]]:
    import envoy_data_plane.envoy.config.core.v3 as core
    import envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 as modes
    import envoy_data_plane.envoy.service.ext_proc.v3 as api
    import envoy_data_plane.envoy.type.v3 as types
    import envoy_data_plane.google.protobuf as pb

    body_mode = modes.ProcessingModeBodySendMode

    def headers(pairs: dict[str, str]) -> Any:
        values = [core.HeaderValue(key=k, raw_value=v.encode()) for k, v in pairs.items()]
        return core.HeaderMap(headers=values)

    def struct(values: dict[str, Any]) -> Any:
        return pb.Struct(fields={name: value_of(value) for name, value in values.items()})

    def value_of(value: Any) -> Any:
        if isinstance(value, str):
            return pb.Value(string_value=value)
        if isinstance(value, bool):
            return pb.Value(bool_value=value)
        if isinstance(value, float):
            return pb.Value(number_value=value)
        if isinstance(value, list):
            return pb.Value(list_value=pb.ListValue(values=[value_of(one) for one in value]))
        return pb.Value(struct_value=struct(value))

    def option(key: str, value: str) -> Any:
        return core.HeaderValueOption(
            header=core.HeaderValue(key=key, raw_value=value.encode()),
            append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )

    def mutation(pairs: dict[str, str], removed: list[str] | None = None) -> Any:
        return api.HeaderMutation(
            set_headers=[option(k, v) for k, v in pairs.items()], remove_headers=removed or []
        )

    requests = {
        "request headers": api.ProcessingRequest(
            request_headers=api.HttpHeaders(
                headers=headers({":method": "POST", ":path": "/v1/completions?x=1"})
            ),
            metadata_context=core.Metadata(
                filter_metadata={
                    "other": struct({"number": 1.5, "flag": True, "deep": {"a": "b"}}),
                    "envoy.lb.subset_hint": struct(
                        {
                            "x-gateway-destination-endpoint-subset": [
                                "10.0.0.1:8000",
                                "10.0.0.2:8000",
                            ]
                        }
                    ),
                }
            ),
            protocol_config=api.ProtocolConfiguration(
                request_body_mode=body_mode.FULL_DUPLEX_STREAMED,
                response_body_mode=body_mode.STREAMED,
            ),
        ),
        "request headers, the end": api.ProcessingRequest(
            request_headers=api.HttpHeaders(
                headers=headers({":method": "GET"}), end_of_stream=True
            ),
            protocol_config=api.ProtocolConfiguration(),
        ),
        "request body": api.ProcessingRequest(request_body=api.HttpBody(body=b"{" * 200)),
        "request body, the end": api.ProcessingRequest(
            request_body=api.HttpBody(body=b"}", end_of_stream=True)
        ),
        "request trailers": api.ProcessingRequest(
            request_trailers=api.HttpTrailers(trailers=headers({"a": "b"}))
        ),
        "response headers": api.ProcessingRequest(
            response_headers=api.HttpHeaders(headers=headers({":status": "200"})),
            metadata_context=core.Metadata(
                filter_metadata={
                    "envoy.lb": struct({"x-gateway-destination-endpoint-served": "10.0.0.2:8000"})
                }
            ),
        ),
        "response body, observed": api.ProcessingRequest(
            response_body=api.HttpBody(body=b"data", end_of_stream=True), observability_mode=True
        ),
        "response trailers": api.ProcessingRequest(response_trailers=api.HttpTrailers()),
    }
    destination = {"x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000"}
    answers = {
        "placed": api.ProcessingResponse(
            request_headers=api.HeadersResponse(
                response=api.CommonResponse(
                    header_mutation=mutation(
                        {**destination, "content-length": "300"}, ["x-octavo-resume"]
                    ),
                    clear_route_cache=True,
                )
            ),
            dynamic_metadata=struct({"envoy.lb": destination}),
        ),
        "passed on": api.ProcessingResponse(
            request_headers=api.HeadersResponse(response=api.CommonResponse())
        ),
        "short piece": api.ProcessingResponse(
            response_body=api.BodyResponse(
                response=api.CommonResponse(
                    body_mutation=api.BodyMutation(
                        streamed_response=api.StreamedBodyResponse(body=b"short")
                    )
                )
            )
        ),
        "long last piece": api.ProcessingResponse(
            request_body=api.BodyResponse(
                response=api.CommonResponse(
                    body_mutation=api.BodyMutation(
                        streamed_response=api.StreamedBodyResponse(
                            body=b"x" * 1000, end_of_stream=True
                        )
                    )
                )
            )
        ),
        "buffered body": api.ProcessingResponse(
            request_body=api.BodyResponse(
                response=api.CommonResponse(
                    header_mutation=mutation(destination),
                    body_mutation=api.BodyMutation(body=b"{}"),
                    clear_route_cache=True,
                )
            ),
            dynamic_metadata=struct({"envoy.lb": destination}),
        ),
        "request trailers": api.ProcessingResponse(request_trailers=api.TrailersResponse()),
        "response trailers": api.ProcessingResponse(response_trailers=api.TrailersResponse()),
        "keep the body": api.ProcessingResponse(
            response_headers=api.HeadersResponse(
                response=api.CommonResponse(header_mutation=mutation({"x-served-by": "e"}))
            ),
            mode_override=modes.ProcessingMode(
                response_header_mode=modes.ProcessingModeHeaderSendMode.SEND,
                response_trailer_mode=modes.ProcessingModeHeaderSendMode.SEND,
            ),
        ),
        "refused": api.ProcessingResponse(
            immediate_response=api.ImmediateResponse(
                status=types.HttpStatus(code=types.StatusCode.TooManyRequests),
                headers=mutation({"retry-after": "3"}),
                body=b"no",
                details="octavo_queue_full",
            )
        ),
        "more time": api.ProcessingResponse(override_message_timeout=timedelta(seconds=31)),
    }
    return {
        "requests": {name: bytes(message).hex() for name, message in requests.items()},
        "answers": {name: bytes(message).hex() for name, message in answers.items()},
    }


if __name__ == "__main__":
    json.dump(make(), sys.stdout, indent=1)
    sys.stdout.write("\n")

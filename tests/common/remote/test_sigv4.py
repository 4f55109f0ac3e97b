"""Signature Version 4 against the examples that AWS publishes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from octavo_common.remote.sigv4 import AwsKey, signed_headers

SUITE = AwsKey("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
SUITE_AT = datetime(2015, 8, 30, 12, 36, tzinfo=UTC)
S3 = AwsKey("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
S3_AT = datetime(2013, 5, 24, tzinfo=UTC)
BUCKET = "https://examplebucket.s3.amazonaws.com"


def signature(headers: dict[str, str]) -> str:
    return headers["authorization"].rpartition("Signature=")[2]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        (
            "/?Param2=value2&Param1=value1",
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
        ),
    ],
)
def test_the_examples_of_the_test_suite(path, expected):
    headers = signed_headers(
        SUITE, "GET", f"https://example.amazonaws.com{path}", {},
        region="us-east-1", service="service", now=SUITE_AT,
    )  # fmt: skip
    assert signature(headers) == expected


@pytest.mark.parametrize(
    ("path", "more", "expected"),
    [
        (
            "/test.txt", {"Range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        ("/?lifecycle", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            "/?max-keys=2&prefix=J", {},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)  # fmt: skip
def test_the_examples_of_s3(path, more, expected):
    headers = signed_headers(
        S3, "GET", BUCKET + path, more, region="us-east-1", service="s3", now=S3_AT
    )
    assert signature(headers) == expected


def test_a_session_token_is_sent_and_signed():
    key = AwsKey(S3.id, S3.secret, "token")
    headers = signed_headers(key, "GET", BUCKET, {}, region="r", service="s3", now=S3_AT)

    assert headers["x-amz-security-token"] == "token"
    assert (
        "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token"
        in (headers["authorization"])
    )


def test_the_port_counts_where_the_host_header_has_it():
    url = "http://127.0.0.1:9000/b"
    assert signed_headers(S3, "GET", url, {}, region="r", service="s3", now=S3_AT)["host"] == (
        "127.0.0.1:9000"
    )

"""How much one request may ask for. Generous, finite, and each a setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Checked before anything is allocated for a request."""

    max_body_bytes: int = 8 * 2**20  # enforced while the body arrives
    max_header_bytes: int = 64 * 2**10  # request line and headers together
    max_json_depth: int = 64
    max_n: int = 128  # answers to one prompt
    max_prompts: int = 1024  # prompts in one completion request
    max_sequences: int = 2048  # prompts times n
    max_messages: int = 4096
    max_stop: int = 64  # stop strings
    max_stop_chars: int = 1024  # each
    max_logprobs: int = 20
    max_logit_bias: int = 4096
    max_token_list: int = 65536  # stop_token_ids, allowed_token_ids, bad_words
    max_concurrent_requests: int = 4096  # HTTP generation requests in flight; more get 503
    header_timeout_s: float = 30.0  # a client that sends its headers slower is disconnected
    body_timeout_s: float = 60.0  # a client that sends its body slower gets 408
    write_timeout_s: float = 60.0  # a client that reads nothing for so long is disconnected

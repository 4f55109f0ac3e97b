"""What should exist for an LLMDeployment: pure functions from the spec to objects.

No client, no clock, no randomness: the same spec and settings give the same bytes.
"""

from octavo_operator.desired.autoscaler import check_autoscaler
from octavo_operator.desired.engine_options import engine_options, extra_arguments, to_toml
from octavo_operator.desired.objects import Traffic, desired_objects
from octavo_operator.desired.revision import revision_of

__all__ = [
    "Traffic",
    "check_autoscaler",
    "desired_objects",
    "engine_options",
    "extra_arguments",
    "revision_of",
    "to_toml",
]

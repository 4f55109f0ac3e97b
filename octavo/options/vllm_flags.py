"""vLLM's flags: taken where they have another name here, refused with advice where they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_common.faults import join_faults
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.vllm_options import UNSUPPORTED_OPTIONS, own_value, refusal, statement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RENAMED = {
    "--h11-max-header-count": "--max-headers",
    "--h11-max-incomplete-event-size": "--max-header-bytes",
    "--max-num-queued-reqs": "--max-queue",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--uvicorn-log-level": "--log-level",
}
SHORT = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
REPLACED = {
    "--disable-fastapi-docs": ("--no-docs",),
    "--disable-log-requests": ("--no-enable-log-requests",),
    "--disable-log-stats": ("--no-log-stats",),
    "--disable-response-store": ("--no-response-store",),
    "--disable-uvicorn-access-log": ("--access-log", "none"),
}
IGNORED = frozenset(
    (
        "--collect-detailed-traces",  # there is one kind of trace
        "--disable-access-log-for-endpoints",  # probes are not logged anyway
    )
)
# What they turn on is always on here.
ALWAYS_SO = frozenset(
    (
        "--async-scheduling",
        "--enable-chunked-prefill",
        "--enable-offline-docs",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
        "--enable-ssl-refresh",
    )
)


def translate(argv: Sequence[str], *, serving: bool = True) -> list[str]:
    """The same setting in our own flags. Unknown words stay for the parser to judge. Raises
    ConfigError for what cannot be had here. Commands that serve nothing pass over settings of the
    server."""
    result: list[str] = []
    faults: list[str] = []
    words = list(argv)
    while words:
        try:
            result += _translated(words, serving=serving)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(join_faults(faults))
    return result


def _translated(words: list[str], *, serving: bool) -> Sequence[str]:
    """Takes one flag from `words`, with its value if that matters. Raises ConfigError."""
    flag, equals, value = words.pop(0).partition("=")
    flag = SHORT.get(flag, flag)
    if flag.startswith("--"):
        flag = flag.replace("_", "-")
    if flag in IGNORED:
        if not equals and words:
            words.pop(0)  # its value
        return ()
    if flag in ALWAYS_SO:
        return ()
    if flag in REPLACED:
        return REPLACED[flag] if serving else ()
    if flag in RENAMED:
        return (RENAMED[flag] + equals + value,)
    if _is_unsupported(flag):
        _check_flag(flag, value if equals else None, words)
        return ()
    if flag == "-O" or (flag.startswith("-O") and flag[2:].isdigit()):
        raise ConfigError(f"{flag}: {UNSUPPORTED_OPTIONS['compilation-config'].advice}")
    if equals:
        return ("=".join(_setting(flag, value)),)
    if words and not words[0].startswith("-"):
        return _setting(flag, words.pop(0))
    return (flag,)


def _setting(flag: str, value: str) -> list[str]:
    found = statement(flag.removeprefix("--").replace("_", "-"), value)
    if found is not None:
        return [f"--{found[0]}", found[1]]
    return [flag, _own(flag, value)]


def check_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a configuration file, in our own names. Raises ConfigError."""
    result: dict[str, Any] = {}
    faults: list[str] = []
    for key, value in settings.items():
        try:
            result |= _translated_key(key, value)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(join_faults(faults))
    return result


def _translated_key(key: str, value: Any) -> dict[str, Any]:
    name = key.replace("_", "-")
    if name in UNSUPPORTED_OPTIONS:
        _refuse(f"config file: {key}", name, value)
        return {}
    if f"--{name}" in RENAMED:
        return {RENAMED[f"--{name}"].removeprefix("--"): value}
    if f"--{name}" in ALWAYS_SO | IGNORED:
        return {}
    own, setting = statement(name, value) or (key, _own(f"config file: {key}", value, name))
    return {own: setting}


def environment_advice(names: Iterable[str], prefix: str) -> dict[str, str]:
    """What to do instead of setting these variables, where they stand for settings of vLLM's."""
    found = {}
    for variable in names:
        option = variable.removeprefix(prefix).lower().replace("_", "-")
        if option in UNSUPPORTED_OPTIONS:
            found[variable] = UNSUPPORTED_OPTIONS[option].advice
    return found


def _is_unsupported(flag: str) -> bool:
    return flag.startswith("--") and _option_of(flag) in UNSUPPORTED_OPTIONS


def _option_of(flag: str) -> str:
    """vLLM takes underscores too, and `--no-` before a switch."""
    name = flag.removeprefix("--").replace("_", "-")
    plain = name.removeprefix("no-")
    is_negated = name != plain and plain in UNSUPPORTED_OPTIONS
    return plain if is_negated and UNSUPPORTED_OPTIONS[plain].is_switch else name


def _check_flag(flag: str, value: str | None, words: list[str]) -> None:
    """Takes its value from `words`, where it has one."""
    name = _option_of(flag)
    given: object = value
    if UNSUPPORTED_OPTIONS[name].is_switch:
        given = value or not flag.startswith("--no")
    elif value is None:
        given = words.pop(0) if words and not words[0].startswith("--") else "(no value)"
    _refuse(flag, name, given)


def _refuse(where: str, name: str, value: object) -> None:
    advice = refusal(name, value, UNSUPPORTED_OPTIONS)
    if advice is not None:
        raise ConfigError(f"{where} is not supported: {advice}")


def _own(where: str, value: Any, name: str = "") -> Any:
    try:
        return own_value(name or where.removeprefix("--").replace("_", "-"), value)
    except ValueError as error:
        raise ConfigError(f"{where} {value} is not supported: {error}") from None

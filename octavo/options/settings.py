"""From the command line, the environment and a file to EngineConfig and ServerSettings."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING, Any

from octavo.models.references import check_short_name, with_local_files
from octavo.options import flags
from octavo.options.vllm_environment import vllm_environment_advice
from octavo.options.vllm_flags import check_file, environment_advice
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from octavo_engine.server.settings import ServerSettings


def add_engine_options(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """The model and how to run it."""
    if positional:
        parser.add_argument("model_positional", metavar="MODEL", nargs="?", help="same as --model")
    group = parser.add_argument_group("engine")
    flags.add_flags(group, flags.ENGINE_FLAGS, EngineConfig)  # type: ignore[arg-type]  # a group adds as a parser does
    parser.add_argument(
        "--config", metavar="FILE", help="TOML or YAML file with the same names as keys"
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    from octavo_engine.server.settings import ServerSettings

    group = parser.add_argument_group("server")
    flags.add_flags(group, flags.SERVER_FLAGS, ServerSettings)  # type: ignore[arg-type]  # as above
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings that result, and where each comes from, then exit",
    )


def engine_config(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> EngineConfig:
    """For commands that run an engine of their own. Raises ConfigError."""
    settings = _resolve(args, environ, serving=False)
    settings.check(EngineConfig)
    config = with_local_files(settings.build(EngineConfig), environ)
    check_short_name(config)
    return config


def serve_settings(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerSettings, flags.FlagSettings]:
    """For `octavo serve`. Raises ConfigError."""
    from octavo_engine.server.settings import ServerSettings

    settings = _resolve(args, environ, serving=True)
    settings.check(EngineConfig, ServerSettings)
    config = with_local_files(settings.build(EngineConfig), environ)
    return config, settings.build(ServerSettings), settings


def warn_of_unknown_environment(environ: Mapping[str, str] = os.environ) -> None:
    unknown = flags.unknown_environment(environ)
    advice = environment_advice(unknown, flags.ENV_PREFIX)
    for name in unknown:
        why = advice.get(name, "nothing reads it")
        print(f"octavo: warning: {name} is set, but {why}", file=sys.stderr)
    for name, sentence in vllm_environment_advice(environ).items():
        print(f"octavo: warning: {name} is not read: {sentence}", file=sys.stderr)


def render_config(
    config: EngineConfig, server: ServerSettings, settings: flags.FlagSettings
) -> str:
    """As the TOML file that would give the same. Keys of callers are not shown."""
    lines = ["# flag > environment > file > default"]
    for title, table, root in (
        ("engine", flags.ENGINE_FLAGS, config),
        ("server", flags.SERVER_FLAGS, server),
    ):
        lines.append(f"\n# {title}")
        for flag in table:
            value = _get(root, flag.path)
            source = settings.source(flag.path)
            if flag.path in flags.SECRET and value:
                count = f"{len(value)} " if isinstance(value, tuple) else ""
                lines.append(f"# {flag.flag} = ({count}set, not shown)  # {source}")
            elif value is None:
                lines.append(f"# {flag.flag} = (unset)")
            else:
                lines.append(f"{flag.flag} = {_toml(value)}  # {source}")
    return "\n".join(lines)


def _resolve(
    args: argparse.Namespace, environ: Mapping[str, str], *, serving: bool
) -> flags.FlagSettings:
    positional = getattr(args, "model_positional", None)
    if positional is not None:
        if hasattr(args, "model") and args.model != positional:
            raise ConfigError(f"two models are given: {positional} and --model {args.model}")
        args.model = positional
    roots = dict(flags.ENGINE_ROOTS)
    table = list(flags.ENGINE_FLAGS)
    if serving:
        from octavo_engine.server.settings import ServerSettings

        roots |= {flag.path: ServerSettings for flag in flags.SERVER_FLAGS}
        table += flags.SERVER_FLAGS
    path = args.config or environ.get("OCTAVO_CONFIG")
    file = _read(path) if path else {}
    if not serving:  # one file may serve all commands
        server_keys = {flag.flag for flag in flags.SERVER_FLAGS}
        file = {k: v for k, v in file.items() if k.replace("_", "-") not in server_keys}
    return flags.resolve(args, table, roots, environ, file)


def _read(path: str) -> dict[str, Any]:
    """TOML, or YAML as vLLM has it, by the file's ending."""
    import tomllib

    is_yaml = path.endswith((".yaml", ".yml"))
    try:
        with open(path, "rb") as file:
            return check_file(_read_yaml(path, file) if is_yaml else tomllib.load(file))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from None


def _read_yaml(path: str, file: IO[bytes]) -> dict[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(file)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {problem}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(f"--config {path} must be a YAML mapping of flags to values")
    return settings


def _get(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_quote, value)) + "]"
    return str(value)


def _quote(text: str) -> str:
    import json

    return json.dumps(text)

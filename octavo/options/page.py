"""docs/settings.md: every flag of the engine and its server, with its variable and default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.options import flags
from octavo_engine.config import EngineConfig
from octavo_engine.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_INTRO = """# Settings

<!-- Written by `python -m octavo.options`; a test compares. -->

Each setting of an engine is a flag, an environment variable, and a key of the file that `--config`
names (TOML or YAML, without the dashes). A flag wins over a variable, a variable over the file.
`octavo serve --print-config` prints the settings that result, and where each comes from. An
`LLMDeployment` has the flags in `spec.engine.args`.

A list is separate words in a flag and separated by commas in a variable. Switches are turned off by
`no-`, as in `--no-docs`, and are `1` or `0` in a variable. Sizes may have units: `2GiB`.

The settings of other parts are in [router.md](router.md), [operator.md](operator.md) and
[chart.md](chart.md).
"""
# Read by parts that have no flag for it, or by libraries.
OTHER_VARIABLES = {
    "OCTAVO_CONFIG": "the file that `--config` names",
    "OCTAVO_HOME": "folder for pulled models, and for what runs on this machine (`~/.octavo`)",
    "OCTAVO_CPU_ISA": "instruction set of the CPU kernels, such as `avx2`; default: the best one",
    "OCTAVO_ISAS": "instruction sets that `make` compiles: `host`, `runnable` or `all`",
    "OCTAVO_POD_IP": "address of the pod, which the operator sets",
    "OCTAVO_CORE_DUMPS": "1: a crash may leave a file with the process's memory, prompts included",
    "OCTAVO_FAILPOINTS": "faults to inject, for tests only",
    "HF_HOME": "folder of the Hub's files, unless `--download-dir` names one",
    "HF_TOKEN": "token for gated and private models on the Hub",
    "HF_ENDPOINT": "address of another hub",
    "HF_HUB_OFFLINE": "`1`: the Hub is not contacted; only what was downloaded is used",
    "HTTPS_PROXY": "proxy for downloads; `NO_PROXY` lists hosts that need none",
    "KUBECONFIG": "file to log in to a cluster with, for `octavo operator` outside of one",
    "NO_COLOR": "set: no colours on a terminal",
}


def settings_page() -> str:
    parts = [_INTRO]
    for title, table, root in (
        ("Engine", flags.ENGINE_FLAGS, EngineConfig),
        ("Server", flags.SERVER_FLAGS, ServerSettings),
    ):
        rows = "\n".join(_rows(table, root))
        parts.append(
            f"\n## {title}\n\n| flag | variable | default | |\n|---|---|---|---|\n{rows}\n"
        )
    others = "\n".join(f"| `{name}` | {text} |" for name, text in OTHER_VARIABLES.items())
    parts.append(f"\n## Other variables\n\n| variable | |\n|---|---|\n{others}\n")
    return "".join(parts)


def _rows(table: Iterable[flags.Flag], root: type[Any]) -> Iterator[str]:
    for flag in table:
        _, default = flags.lookup(root, flag.path)
        shown = "" if default in (None, (), "") else f"`{flags.show_value(default)}`"
        variables = f"`{flag.env}`" + (f", `{flag.also_env}`" if flag.also_env else "")
        text = flag.help.replace("|", "\\|")
        yield f"| `--{flag.flag}` | {variables} | {shown} | {text} |"

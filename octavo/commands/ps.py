"""`octavo ps`: the servers that run on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Show the servers on this machine.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from octavo.local.home import Home
    from octavo.models.server_load import loads_of
    from octavo.models.servers import resident_bytes, running_servers
    from octavo.models.table import age_text, columns, size_text

    home = Home.find(os.environ)
    servers, owner = running_servers(home), home.owner()
    loads = loads_of([each.url for each in servers], os.environ)
    if args.json:
        fields = [
            asdict(each)
            | {"memory": resident_bytes(each.pid), "load": None if load is None else asdict(load)}
            for each, load in zip(servers, loads, strict=True)
        ]
        platform = None if owner is None else asdict(owner)
        print(json.dumps({"servers": fields, "up": platform}, indent=2))
        return 0
    if not servers and owner is None:
        print("No servers run here. octavo serve smollm2 starts one.")
        return 0
    rows = [
        (
            str(each.pid), ", ".join((load and load.models) or each.models), each.state,
            load.text if load else "no answer", each.url,
            size_text(resident_bytes(each.pid)), age_text(each.since),
        )
        for each, load in zip(servers, loads, strict=True)
    ]  # fmt: skip
    if owner is not None:
        rows.append((str(owner.pid), "octavo up", "", "", owner.url, "", ""))
    print(columns(("PID", "MODEL", "STATE", "REQUESTS", "URL", "MEMORY", "SINCE"), rows))
    return 0

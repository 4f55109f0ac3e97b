"""`make fuzz`: made-up requests to every endpoint until time is up; stops at the first fault."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from contextlib import nullcontext

import httpx

from octavo_engine.server.settings import ServerSettings
from octavo_router.proxy.paths import PROXIED
from tests.fakes.api_fuzz import (
    LEFT_OUT,
    MODES,
    Contract,
    Fuzz,
    check_raw,
    raw_requests,
    send_raw,
)
from tests.fakes.router_process import routing
from tests.fakes.simulated import simulating


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--router", action="store_true", help="with a router in front")
    parser.add_argument("--path", help="only routes whose path contains this")
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    sys.stdout.flush()
    ends_at = time.monotonic() + args.seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        simulating(
            settings=ServerSettings(dev_mode=True, tokenizer_info=True, files_dir=folder)
        ) as server,
        httpx.Client(timeout=20) as client,
        routing("--upstreams", server.url) if args.router else nullcontext() as router,
    ):
        contract = Contract(client.get(server.url + "/openapi.json").json())
        front = router.url if router is not None else server.url
        port = router.port if router is not None else server.port
        fuzz = Fuzz(server, client, contract, base_url=front)
        routes = [
            (method, path)
            for method, path in fuzz.contract.operations()
            if path not in LEFT_OUT
            and (args.path is None or args.path in path)
            and (router is None or path in PROXIED)
        ]
        num_raw = 0
        for number in itertools.count(args.seed):
            order = [(*route, mode) for route in routes for mode in MODES]
            random.Random(number).shuffle(order)
            raw = raw_requests(number, 10**9)
            for method, path, mode in order:
                if time.monotonic() > ends_at:
                    statuses = dict(sorted(fuzz.statuses.items()))
                    sys.stdout.write(f"clean: {statuses} and {num_raw} raw requests\n")
                    return 0
                fuzz.batch(method, path, mode, examples=10, number=number)
                for data in itertools.islice(raw, 20):
                    check_raw(data, send_raw(port, data))
                    num_raw += 1
                server.check_idle()
    raise AssertionError("count never ends")


if __name__ == "__main__":
    sys.exit(main())

"""What `helm test` runs in the router's image: /ready, then /v1/models, for a minute at most."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["ROUTER_URL"]
KEY = os.environ.get("ROUTER_KEY", "")
CA = os.environ.get("ROUTER_CA") or None
DEADLINE_S = 60.0


def ask(path: str) -> bytes:
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    tls = ssl.create_default_context(cafile=CA) if URL.startswith("https:") else None
    request = urllib.request.Request(URL + path, headers=headers)
    with urllib.request.urlopen(request, timeout=5, context=tls) as answer:
        body: bytes = answer.read()
        return body


def main() -> int:
    give_up_at = time.monotonic() + DEADLINE_S
    while True:
        try:
            ask("/ready")
            models = [model["id"] for model in json.loads(ask("/v1/models"))["data"]]
            break
        except urllib.error.HTTPError as error:
            problem = (
                f"{error.url} answered {error.code}: {error.read(300).decode(errors='replace')}"
            )
            if error.code in (401, 403):  # it will not change its mind
                print(f"{problem}\nSet test.apiKeySecret to a Secret with an API key.")
                return 1
        except OSError as error:
            problem = f"{URL}: {error}"
        if time.monotonic() > give_up_at:
            print(problem)
            return 1
        time.sleep(1)
    print(f"{URL} is ready and serves: {', '.join(models) or 'no model yet'}")
    return 0


sys.exit(main())

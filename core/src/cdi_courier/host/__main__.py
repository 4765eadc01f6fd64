"""``python -m cdi_courier.host``: a request as JSON on stdin, the host as JSON on stdout. For `describe`."""

from __future__ import annotations

import json
import os
import sys

from cdi_courier.host.model import to_json
from cdi_courier.host.probe import host, request_from


def main() -> None:
    """Answer one request, and end without waiting for threads that still ask."""
    # What libraries print must not get into the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    found = host(request_from(json.load(sys.stdin)))
    with open(answer, "w", encoding="ascii") as file:
        json.dump(to_json(found), file)
    os._exit(0)


if __name__ == "__main__":
    main()

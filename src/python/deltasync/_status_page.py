"""What an agent on this host says of itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
from collections.abc import Sequence

from .tls import Tls

_LIMIT_S = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def cut_off(port: int, agent_args: Sequence[str], tls: Tls) -> str:
    """For how long no newer version has come to the agent whose pages are at this port, and why. Empty: one may come,
    or the agent does not answer."""
    place = re.search(r"--http[= ]\[?([^ \]]+?)\]?:\d+( |$)", " ".join(agent_args))
    host = place[1] if place else "127.0.0.1"
    host = _ANY.get(host, host)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        asked = http.client.HTTPConnection(host, port, timeout=_LIMIT_S)
        if tls.cert and "--http-plain" not in agent_args:
            # It is an agent of ours, whatever name its certificate has.
            context = ssl.create_default_context(cafile=tls.ca or None)
            context.check_hostname = False
            context.load_cert_chain(tls.cert, tls.key)
            asked = http.client.HTTPSConnection(host, port, timeout=_LIMIT_S, context=context)
        with contextlib.closing(asked):
            asked.request("GET", "/v1/status")
            if since := json.load(asked.getresponse())["cut_off"]:
                return f"the agent has been cut off for {since['seconds']:.0f} s: {since['why']}"
    return ""

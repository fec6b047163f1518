"""How connections are encrypted, and who may be at their other end."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import _native


@dataclass(frozen=True)
class Tls:
    """Files of TLS, as of ``deltasync-agent --tls-...``; see ``docs/security.md``. All are PEM, and are read again when
    they change.

    ``cert`` and ``key`` are this side's own: an agent needs them, a receiver only if its agent asks for certificates.
    ``ca`` has the CAs that may have signed the other side's: a receiver needs it; an agent that has it lets in only
    receivers with such a certificate. ``name`` is the name in the agent's certificate, if it is not the host that the
    receiver dials. ``allow`` are the names of receivers that an agent lets in; none: all that ``ca`` signed.
    """

    cert: str | os.PathLike[str] = ""
    key: str | os.PathLike[str] = ""
    ca: str | os.PathLike[str] = ""
    name: str = ""
    allow: tuple[str, ...] = ()

    def _of_receiver(self) -> _native.TlsOptions:
        return _native.TlsOptions(os.fspath(self.cert), os.fspath(self.key), os.fspath(self.ca), self.name)

    def _of_agent(self) -> list[str]:
        files = {"--tls-cert": self.cert, "--tls-key": self.key, "--tls-ca": self.ca}
        args = [word for option, file in files.items() if file for word in (option, os.fspath(file))]
        return args + [word for name in self.allow for word in ("--tls-allow", name)]

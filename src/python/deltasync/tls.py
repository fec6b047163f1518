"""How connections are encrypted, and who may be at their other end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from . import _native
from .errors import InvalidArgument, NotFound

_REMEDY = "give deltasync.Tls(cert=..., key=..., ca=...), or a mapping with these keys"


@dataclass(frozen=True)
class Tls:
    """Files of TLS, as of ``deltasync-agent --tls-...``; see ``security.md``. All are PEM, and are read again when
    they change.

    ``cert`` and ``key`` are this side's own: an agent needs them, a receiver only if its agent asks for certificates.
    ``ca`` has the CAs that may have signed the other side's: a receiver needs it; an agent that has it lets in only
    receivers with such a certificate. ``name`` is the name in the agent's certificate, if it is not the host that the
    receiver dials. ``allow`` are the names of receivers that an agent lets in; none: all that ``ca`` signed. Each side
    passes over what is the other's.

    Wherever there is a ``tls=`` it may be a mapping with these keys instead, as configuration files have them.
    InvalidArgument names a value that cannot be one.
    """

    cert: str | os.PathLike[str] = ""
    key: str | os.PathLike[str] = ""
    ca: str | os.PathLike[str] = ""
    name: str = ""
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in ("cert", "key", "ca"):
            file = getattr(self, option)
            if not isinstance(file, (str, os.PathLike)):
                raise InvalidArgument(f"tls: {option}={file!r} is no path", "give the path of a PEM file")
        if not isinstance(self.name, str):
            raise InvalidArgument(f"tls: name={self.name!r} is no text", "give the name in the agent's certificate")
        allow = (self.allow,) if isinstance(self.allow, str) else self.allow
        if not isinstance(allow, (list, tuple)) or not all(isinstance(name, str) and name for name in allow):
            raise InvalidArgument(f"tls: allow={self.allow!r} is no list of names", "list those in certificates")
        object.__setattr__(self, "allow", tuple(allow))

    @classmethod
    def of(cls, value: TlsLike, argument: str = "tls") -> Tls:
        """What a ``tls=`` means: None is no TLS. InvalidArgument, with the ``argument``'s name."""
        if value is None or isinstance(value, Tls):
            return value or cls()
        if not isinstance(value, Mapping):
            raise InvalidArgument(f"{argument}={value!r}: these are no options of TLS", _REMEDY)
        known = [field.name for field in fields(cls)]
        unknown = [key for key in value if key not in known]
        if unknown:
            there = ", ".join(known)
            raise InvalidArgument(f"{argument}: there is no option {unknown[0]!r} of TLS, but {there}", _REMEDY)
        if not value:
            raise InvalidArgument(f"{argument}={value!r} has no option of TLS", f"{_REMEDY}, or None for no TLS")
        return cls(**value)

    def as_mapping(self) -> dict[str, Any]:
        """What differs from no TLS, for JSON: :meth:`of` makes the same of it."""
        files = {option: os.fspath(getattr(self, option)) for option in ("cert", "key", "ca")}
        return {key: value for key, value in (files | {"name": self.name, "allow": list(self.allow)}).items() if value}

    def _of_receiver(self) -> _native.TlsOptions:
        cert, key, ca = self._files()
        if cert and not ca:
            raise InvalidArgument("tls: a receiver needs ca=", "give the certificates of who signed the agent's")
        return _native.TlsOptions(cert, key, ca, self.name)

    def _of_server(self) -> _native.TlsOptions:
        cert, key, ca = self._files()
        if ca and not cert:
            raise InvalidArgument("tls: a server needs cert= and key=", "give its own certificate and private key")
        return _native.TlsOptions(cert, key, ca, "", list(self.allow))

    def _of_agent(self) -> list[str]:
        cert, key, ca = self._files()
        if ca and not cert:
            raise InvalidArgument("tls: an agent needs cert= and key=", "give its own certificate and private key")
        for option, file in (("cert", cert), ("key", key), ("ca", ca)):
            if file and not os.path.exists(file):
                remedy = "make it as docs/guides/security.md says"
                raise NotFound(f"tls: {option}='{file}': there is no such file", remedy)
        files = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
        args = [word for option, file in files.items() if file for word in (option, file)]
        return args + [word for name in self.allow for word in ("--tls-allow", name)]

    def _files(self) -> tuple[str, str, str]:
        cert, key, ca = (str(os.fspath(file)) for file in (self.cert, self.key, self.ca))
        if bool(cert) != bool(key):
            raise InvalidArgument("tls: cert= and key= belong together", "give both, or neither")
        return cert, key, ca


TlsLike = Tls | Mapping[str, Any] | None

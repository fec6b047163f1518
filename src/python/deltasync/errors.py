"""What can go wrong, as exceptions: one class for each code of the library (include/deltasync/result.hpp).

Every exception says in its message what it was doing to what (the tensor, the peer, the deadline). ``code`` is the
library's name for it, ``remedy`` what usually helps. Where Python has a class of its own for the case, that is a base
too, so ``except TimeoutError`` and ``except ConnectionError`` do what they say.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Cancelled",
    "ConnectionFailed",
    "CorruptData",
    "CoverageError",
    "DeadlinePassed",
    "Error",
    "InternalError",
    "InvalidArgument",
    "IoError",
    "LayoutMismatch",
    "LeaseRevoked",
    "NoSpace",
    "NotFound",
    "OutOfRange",
    "PeerDied",
    "PermissionDenied",
    "ProtocolError",
    "Quarantined",
    "Unauthenticated",
    "UnmatchedWeights",
    "Unsupported",
    "VersionConflict",
    "VersionGone",
    "from_code",
]


class Error(Exception):
    """Base of all exceptions that deltasync raises."""

    code: ClassVar[str] = "error"
    #: The class's, unless the one who raised it knew better.
    remedy: str = ""

    def __init__(self, message: str = "", remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if remedy is not None:
            self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[type[Error], tuple[str, str]]:
        return type(self), (self.message, self.remedy)


class InvalidArgument(Error, ValueError):
    code = "invalid_argument"


class OutOfRange(Error, IndexError):
    code = "out_of_range"


class CorruptData(Error):
    code = "corrupt"
    remedy = "nothing of it was published; pull again"


class Unsupported(Error, NotImplementedError):
    code = "unsupported"


class LayoutMismatch(Error):
    code = "layout_mismatch"
    remedy = "both sides need the same tensors; where the trainer's have changed, connect and bind again"


class UnmatchedWeights(LayoutMismatch):
    """Tensors of the trainer that the model has no place for, or weights of the model that no tensor fills."""

    code = "unmatched_weights"
    remedy = (
        "publish the names that the checkpoint on disk has; what shall stay as it is, on either side, is listed as "
        'ignore=["PATTERN", ...]'
    )


class VersionConflict(Error):
    code = "version_conflict"
    remedy = "version numbers grow within one epoch, and one trainer fills a segment at a time"


class CoverageError(Error):
    code = "coverage"
    remedy = "every tensor of the layout is offloaded exactly once a version; the one before stays active"


class VersionGone(Error, LookupError):
    code = "gone"
    remedy = "pull the newest version"


class LeaseRevoked(Error):
    code = "lease_revoked"
    remedy = "pull again"


class DeadlinePassed(Error, TimeoutError):
    code = "timed_out"
    remedy = "what was verified is kept; try again, or give a larger timeout"


class Aborted(Error):
    code = "aborted"
    remedy = "the version before stays active; offload a new one"


class Quarantined(Error):
    code = "quarantined"
    remedy = "a stopped process or a device may still write there: continue or end it"


class PeerDied(Error, ConnectionError):
    code = "peer_died"


class ConnectionFailed(Error, ConnectionError):
    code = "connection"
    remedy = "is the agent running there, and its port open to this host?"


class ProtocolError(Error, ConnectionError):
    code = "protocol"
    remedy = "what answers there is no deltasync agent of this release"


class Unauthenticated(Error, PermissionError):
    code = "unauthenticated"


class AlreadyExists(Error, FileExistsError):
    code = "already_exists"


class NotFound(Error, LookupError):
    code = "not_found"


class PermissionDenied(Error, PermissionError):
    code = "permission"


class NoSpace(Error, OSError):
    code = "no_space"
    remedy = "the message says how much is needed; `deltasync clean` lists what dead processes left in /dev/shm"


class IoError(Error, OSError):
    code = "io"


class InternalError(Error, RuntimeError):
    code = "internal"
    remedy = "this is a bug of deltasync"


class Cancelled(Error):
    code = "cancelled"


_CLASSES: dict[str, type[Error]] = {
    cls.code: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, Error)
}


def from_code(code: str, message: str, remedy: str | None = None) -> Error:
    """The exception of a library code; for the native module."""
    return _CLASSES.get(code, Error)(message, remedy)

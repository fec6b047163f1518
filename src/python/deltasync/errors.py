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
    """A wrong argument, or a tensor of another shape or dtype."""

    code = "invalid_argument"


class OutOfRange(Error, IndexError):
    """A number beyond what there is."""

    code = "out_of_range"


class CorruptData(Error):
    """Bytes without their digest."""

    code = "corrupt"
    remedy = "nothing of it was published; pull again"


class Unsupported(Error, NotImplementedError):
    """A dtype, device or placement that this build does not do."""

    code = "unsupported"


class LayoutMismatch(Error):
    """The trainer's tensors are others than those here."""

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
    """A number that does not grow, or a second trainer."""

    code = "version_conflict"
    remedy = "version numbers grow within one epoch, and one trainer fills a segment at a time"


class CoverageError(Error):
    """A tensor was missing or came twice."""

    code = "coverage"
    remedy = "every tensor of the layout is offloaded exactly once a version; the one before stays active"


class VersionGone(Error, LookupError):
    """The version is kept no more."""

    code = "gone"
    remedy = "pull the newest version"


class LeaseRevoked(Error):
    """The trainer needed the memory that was read."""

    code = "lease_revoked"
    remedy = "pull again"


class DeadlinePassed(Error, TimeoutError):
    """The message says what it waited for."""

    code = "timed_out"
    remedy = "nothing is lost: try again, or give a larger timeout"


class Aborted(Error):
    """Another rank failed, so this version is dropped on all."""

    code = "aborted"
    remedy = "the version before stays active; offload a new one"


class Quarantined(Error):
    """A half may still be written by someone who has left the fill."""

    code = "quarantined"
    remedy = "a stopped process or a device may still write there: continue or end it"


class PeerDied(Error, ConnectionError):
    """A process on the other side of a socket or segment died."""

    code = "peer_died"


class ConnectionFailed(Error, ConnectionError):
    """No agent answers there, or the connection broke."""

    code = "connection"
    remedy = "is the agent running there, and its port open to this host?"


class ProtocolError(Error, ConnectionError):
    """Something else than an agent answers."""

    code = "protocol"
    remedy = "what answers there is no deltasync agent of this release"


class Unauthenticated(Error, PermissionError):
    """No token or certificate, or a wrong one."""

    code = "unauthenticated"


class AlreadyExists(Error, FileExistsError):
    """A name, slot or directory that somebody has."""

    code = "already_exists"


class NotFound(Error, LookupError):
    """A tensor, label, program or file that is not there."""

    code = "not_found"


class PermissionDenied(Error, PermissionError):
    """Another user, or the mode of a file."""

    code = "permission"


class NoSpace(Error, OSError):
    """Memory or disk is too small."""

    code = "no_space"
    remedy = "make room; `deltasync clean` lists what dead processes left in /dev/shm"


class IoError(Error, OSError):
    """A device or a file failed."""

    code = "io"


class InternalError(Error, RuntimeError):
    """A fault of deltasync."""

    code = "internal"
    remedy = "this is a bug of deltasync"


class Cancelled(Error):
    """``cancel()``, or ``close()`` while it waited."""

    code = "cancelled"


_CLASSES: dict[str, type[Error]] = {
    cls.code: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, Error)
}


def from_code(code: str, message: str, remedy: str | None = None) -> Error:
    """The exception of a library code; for the native module."""
    return _CLASSES.get(code, Error)(message, remedy)

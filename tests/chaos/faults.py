"""What a chaos run does to its processes, their memory and their disks."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import re
import socket
import struct
from pathlib import Path

from chaos_model import VARIANTS, specs
from record import Flip, Record, offset_of

STATE_AT, STATE_STRIDE = 0x300, 0x80
INFO_AT, INFO_STRIDE = 0x400, 0x100
HALF_OFFSET_AT = 40
ACTIVE = 0x69


def newest_segment(directory: Path, name: str) -> Path | None:
    found = [path for path in directory.glob(f"{name}.g*") if re.fullmatch(r"\.g\d+", path.suffix)]
    return max(found, key=lambda path: int(path.suffix[2:]), default=None)


def _half(memory: mmap.mmap, half: int) -> tuple[int, tuple[int, int]]:
    (word,) = struct.unpack_from("<Q", memory, STATE_AT + half * STATE_STRIDE)
    epoch, number = struct.unpack_from("<QQ", memory, INFO_AT + half * INFO_STRIDE)
    return word, (epoch, number)


def flip_bit(directory: Path, name: str, random_: random.Random) -> Flip | None:
    """Flips one bit of the half that is served, as a stray write would. None if there is none to be had."""
    path = newest_segment(directory, name)
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError), path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0) as memory:
            for half in range(2):
                word, version = _half(memory, half)
                if word >> 56 != ACTIVE:
                    continue
                variant = version[1] % VARIANTS
                tensor = random_.randrange(len(specs(variant)))
                spec = specs(variant)[tensor]
                element, bit = random_.randrange(spec.elements), random_.randrange(8 * spec.width)
                (begin,) = struct.unpack_from("<Q", memory, HALF_OFFSET_AT + 8 * half)
                at = begin + offset_of(variant, tensor, element) + bit // 8
                memory[at] ^= 1 << bit % 8
                after, then = _half(memory, half)
                return Flip(tensor, element, bit, {version, then} if after != word else {version})
    return None


async def flood(port: int, random_: random.Random, connections: int, seconds: float) -> None:
    """Strangers: silent connections, and some that say half of something."""
    opened: list[socket.socket] = []
    for _ in range(connections):
        s = socket.socket()
        s.setblocking(False)
        with contextlib.suppress(OSError):
            s.connect_ex(("127.0.0.1", port))
        opened.append(s)
    await asyncio.sleep(0.05)
    for s in opened[::3]:
        with contextlib.suppress(OSError):
            s.send(random_.randbytes(random_.randrange(1, 96)))
    await asyncio.sleep(seconds)
    for s in opened:
        s.close()


class SlowLink:
    """A proxy that lets little through: who pulls behind it holds its leases for long."""

    def __init__(self, port_of_agent: int, bytes_per_s: int) -> None:
        self.port_of_agent = port_of_agent
        self.bytes_per_s = bytes_per_s
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0, limit=1 << 14)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port_of_agent, limit=1 << 14)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, up_writer, 0), self._pump(up_reader, writer, self.bytes_per_s))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: int) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(8192):
                writer.write(data)
                await writer.drain()
                if bytes_per_s:
                    await asyncio.sleep(len(data) / bytes_per_s)
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


async def fill_up(directory: Path, seconds: float, record: Record) -> None:
    """Takes all the space of a filesystem for a while."""
    filler = directory / "filler"
    with contextlib.suppress(OSError):
        with filler.open("wb") as out:
            with contextlib.suppress(OSError):
                free = os.statvfs(directory)
                os.posix_fallocate(out.fileno(), 0, max(1, free.f_bavail * free.f_frsize - 4096))
            record.counts["filled " + directory.name] += 1
            await asyncio.sleep(seconds)
    filler.unlink(missing_ok=True)

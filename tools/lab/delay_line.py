"""delay_line.py NAME MS: makes the interfaces NAME and eth0 and carries each frame from one to the other, MS later.

For kernels without netem. One process a link; it ends with its host."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x1002
FRAME_MAX = 65536
TURN = 64  # frames that are taken before others are sent


def tap(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return end


def take(end: int, queue: deque[tuple[float, bytes]], delay_s: float) -> None:
    for _ in range(TURN):
        try:
            frame = os.read(end, FRAME_MAX)
        except OSError:  # none is there, or the link is cut
            return
        queue.append((time.monotonic() + delay_s, frame))


def send_due(queue: deque[tuple[float, bytes]], end: int) -> None:
    while queue and queue[0][0] <= time.monotonic():
        frame = queue.popleft()[1]
        try:
            os.write(end, frame)
        except OSError:  # lost, as on a link that is cut
            pass


def main() -> None:
    ends = [tap(sys.argv[1]), tap("eth0")]
    delay_s = float(sys.argv[2]) / 1000
    print("up", flush=True)
    queues: dict[int, deque[tuple[float, bytes]]] = {ends[0]: deque(), ends[1]: deque()}  # by where they came from
    while True:
        due = [queue[0][0] for queue in queues.values() if queue]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for end in select.select(ends, [], [], wait)[0]:
            take(end, queues[end], delay_s)
        send_due(queues[ends[0]], ends[1])
        send_due(queues[ends[1]], ends[0])


if __name__ == "__main__":
    main()

"""A TCP relay with a round-trip time, for kernels without netem: python benchmarks/relay.py RTT_MS PORT=HOST:PORT …

Each direction is late by half of it, whatever its throughput: every piece that was read is written when its time has
come. A connection's first bytes are late by the handshake, too, which the relay's own accept hides: the far side
accepts after one and a half round trips, so that its banner arrives after two. TCP's slow start is not modelled: a
large answer is as fast as a small one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from functools import partial

PIECE = 1 << 18
Pieces = asyncio.Queue[tuple[float, bytes]]
open_connections: set[asyncio.Task[None]] = set()  # asyncio itself refers to them weakly, and one in use was collected


async def take(reader: asyncio.StreamReader, pieces: Pieces, late: float, first: float) -> None:
    """Queue what comes, with the time at which it is to arrive: `late` seconds later, and not before `first`."""
    loop, data = asyncio.get_running_loop(), b"-"
    while data:
        try:
            data = await reader.read(PIECE)
        except OSError:
            data = b""  # a reset is an end, too
        pieces.put_nowait((max(loop.time() + late, first), data))


async def give(pieces: Pieces, writer: asyncio.StreamWriter) -> None:
    """Write each piece in its time, until the end."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while True:
            due, data = await pieces.get()
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


def without_nagle(writer: asyncio.StreamWriter) -> None:
    """TCP_NODELAY, or a piece would wait for the answer to the one before it."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def relay(
    target: tuple[str, int], rtt: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection."""
    task = asyncio.current_task()
    assert task is not None
    open_connections.add(task)
    task.add_done_callback(open_connections.discard)
    without_nagle(writer)
    begin = asyncio.get_running_loop().time()
    there, back = Pieces(), Pieces()
    taking = asyncio.create_task(take(reader, there, rtt / 2, begin + 1.5 * rtt))
    await asyncio.sleep(1.5 * rtt)
    try:
        far_reader, far_writer = await asyncio.open_connection(*target)
    except OSError:
        writer.close()
        await taking
        return
    without_nagle(far_writer)
    try:
        await asyncio.gather(
            taking, give(there, far_writer), take(far_reader, back, rtt / 2, begin + 2 * rtt), give(back, writer)
        )
    finally:
        far_writer.close()
        writer.close()


async def main(arguments: list[str]) -> None:
    """Relay until it is ended."""
    rtt = float(arguments[0]) / 1000
    for each in arguments[1:]:
        port, _, target = each.partition("=")
        host, _, far_port = target.rpartition(":")
        await asyncio.start_server(partial(relay, (host, int(far_port)), rtt), "127.0.0.1", int(port))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

"""How many single-query requests a second `evenhand serve` answers, and how soon.

python benchmarks/serving.py runs/demo/s2m [runs/large ...] [--requests 20000] [--output FILE]

Starts the server for each run, asks test queries by 32 connections that each send the next request
when they have the last answer, and counts. The clients are one process beside the server on the
same machine, and plain sockets: an HTTP library would cost more than the server.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.data import open_dataset
from evenhand.files import write_json
from evenhand.run_folder import read_about

RESULTS = Path(__file__).parent / "results" / "serving.json"
WARM_UP = 500  # requests that are not counted
HEAD = (
    b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


def start_server(run: Path) -> tuple[subprocess.Popen[str], int]:
    """The server of a run, ready, and its port."""
    command = [sys.executable, "-m", "evenhand", "serve", str(run), "--port", "0", "--quiet"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    return server, int(line.rsplit(":", 1)[1])


def requests_of(run: Path, count: int) -> list[bytes]:
    """Requests for so many test queries, as they go over the wire."""
    dataset = open_dataset(Path(read_about(run)["dataset"]["folder"]))
    texts = dataset.parts["test"].texts
    assert texts is not None
    chosen = np.random.default_rng(0).integers(len(texts), size=count).tolist()
    messages = []
    for query in chosen:
        body = json.dumps({"queries": [texts[query]]}).encode()
        messages.append(HEAD % len(body) + body)
    return messages


async def ask_all(
    port: int, messages: list[bytes], num_connections: int
) -> tuple[list[float], int]:
    """Seconds of every request, and how many were not answered with 200."""
    waiting, seconds, num_errors = iter(messages), [], 0

    async def client() -> None:
        nonlocal num_errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for message in waiting:
            started = time.perf_counter()
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            seconds.append(time.perf_counter() - started)
            num_errors += not head.startswith(b"HTTP/1.1 200")
        writer.close()

    await asyncio.gather(*(client() for _ in range(num_connections)))
    return seconds, num_errors


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(run: Path, num_requests: int, num_connections: int) -> dict[str, Any]:
    """Requests a second and their times, and the memory after a tenth of them and after all."""
    server, port = start_server(run)
    try:
        messages = requests_of(run, num_requests + WARM_UP)
        asyncio.run(ask_all(port, messages[:WARM_UP], num_connections))
        sizes, seconds, num_errors, total = [], [], 0, 0.0
        of_server, of_clients = -cpu_seconds(server.pid), -time.process_time()
        tenth = WARM_UP + num_requests // 10
        for part in (messages[WARM_UP:tenth], messages[tenth:]):
            started = time.perf_counter()
            times, errors = asyncio.run(ask_all(port, part, num_connections))
            total += time.perf_counter() - started
            seconds += times
            num_errors += errors
            sizes.append(resident_bytes(server.pid))
        of_server, of_clients = (
            of_server + cpu_seconds(server.pid),
            of_clients + time.process_time(),
        )
    finally:
        server.terminate()
        server.wait(30)
    about = read_about(run)["dataset"]
    return {
        "labels": about["num_labels"],
        "requests": num_requests,
        "connections": num_connections,
        "requests_a_second": round(num_requests / total, 1),
        "milliseconds": {
            name: round(1000 * float(np.quantile(seconds, level)), 1)
            for name, level in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("most", 1.0))
        },
        "cpu_milliseconds_a_request": {  # what depends least on who else uses the machine
            "server": round(1000 * of_server / num_requests, 2),
            "clients": round(1000 * of_clients / num_requests, 2),
        },
        "errors": num_errors,
        "mb_after_a_tenth": round(sizes[0] / 1e6, 1),
        "mb_at_the_end": round(sizes[1] / 1e6, 1),
        "load_average": [round(load, 1) for load in os.getloadavg()],  # of whatever else ran, too
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = []
    for run in given.runs:
        load_before = os.getloadavg()[0]
        row = measure(run, given.requests, given.connections)
        rows.append(row | {"load_before": round(load_before, 1)})
        print(json.dumps(rows[-1]), flush=True)
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    write_json(given.output, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()

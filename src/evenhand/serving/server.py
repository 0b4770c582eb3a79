"""The routes, and the process that serves them."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from evenhand.errors import UserError
from evenhand.serving.batching import Batcher, QueueFullError, Work
from evenhand.serving.connections import protocol_within
from evenhand.serving.examples import telling_queries
from evenhand.serving.gate import Gate, Limits, problem
from evenhand.serving.served_run import ServedRun
from evenhand.version import __version__

PAGE = Path(__file__).parent / "page"
BACKLOG = 2048  # connections that wait to be accepted
LIMITS = Limits()  # those of a single request are part of the schema
# A report is one file with its own style and script; in a sandbox it reaches nothing of the page.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:"
)

# --- what goes in and out -------------------------------------------------------------------------


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("a query must hold more than white space")
    return text


Query = Annotated[str, Field(max_length=LIMITS.query_length), AfterValidator(_not_blank)]
Queries = Annotated[list[Query], Field(min_length=1, max_length=LIMITS.num_queries)]
RunName = Annotated[str | None, Field(description="One of GET /runs; the first if none is named.")]


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SearchRequest(Asked):
    queries: Queries
    num_results: Annotated[int, Field(ge=1, le=LIMITS.num_results)] = 10
    run: RunName = None
    explain: Annotated[bool, Field(description="Name what matched; of one query alone.")] = False


class EncodeRequest(Asked):
    queries: Queries
    run: RunName = None


class Ngram(BaseModel):
    ngram: Annotated[str, Field(description="^ and $ stand for the ends of the query.")]
    score: Annotated[float, Field(description="What it adds to the score.")]


class Answer(BaseModel):
    id: int
    label: str
    score: float
    place: Annotated[list[float] | None, Field(description="Latitude and longitude.")] = None
    matched: Annotated[list[Ngram] | None, Field(description="If it was asked for.")] = None


class SearchResponse(BaseModel):
    run: str
    results: Annotated[list[list[Answer]], Field(description="A list for each query.")]


class EncodeResponse(BaseModel):
    run: str
    vectors: Annotated[list[list[float]], Field(description="A vector for each query.")]


class RunInfo(BaseModel):
    name: str
    method: str
    dataset: str
    fingerprint: str
    num_labels: int
    dimension: int
    loaded: str
    has_map: bool
    has_report: bool
    attribution: str


class WorldMap(BaseModel):
    width: int
    height: int
    north: int
    units: int
    path: str


class Example(BaseModel):
    query: str
    label_id: int
    label: str
    found_by: str
    missed_by: str


class Problem(BaseModel):
    detail: str


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Problem} for status in (401, 422, 429, *statuses)}


def _json(value: Any) -> Response:
    """Rendered by hand: what we made ourselves needs no second validation, which takes longer."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # A name from old data may hold half a surrogate pair.
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


# --- runs -----------------------------------------------------------------------------------------


class Runs:
    """The runs that are served, by name; one is replaced as a whole or not at all."""

    def __init__(
        self, folders: Sequence[Path], *, device: torch.device, index: str | None = None
    ) -> None:
        self.how: Any = {"device": device, "index": index}
        self.by_name: dict[str, ServedRun] = {}
        for folder in folders:
            run = ServedRun(folder, **self.how)
            if run.name in self.by_name:
                other = self.by_name[run.name].folder
                raise UserError(f"{other} and {folder} have one name, {run.name}; rename one")
            self.by_name[run.name] = run
        self.examples: list[dict[str, Any]] = []

    def find(self, name: str | None) -> ServedRun:
        if name is None:
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise HTTPException(404, f"there is no such run; there are: {known}")
        return self.by_name[name]

    def find_examples(self) -> None:
        self.examples = telling_queries([run.folder for run in self.by_name.values()])

    def reload(self) -> list[str]:
        """Loads every run anew beside the old one; returns a sentence for each that is refused."""
        refused = []
        for name, old in list(self.by_name.items()):
            try:
                self.by_name[name] = ServedRun(old.folder, **self.how)
            except Exception as error:  # whatever is wrong with the new run, the old one answers
                refused.append(f"{name} is served as it was: {error}")
        self.find_examples()
        return refused


# --- routes ---------------------------------------------------------------------------------------


def make_app(
    runs: Runs,
    limits: Limits = LIMITS,
    *,
    api_key: str | None = None,
    is_local: bool = False,
    log_fn: Callable[[str], None] | None = None,
) -> ASGIApp:
    """The whole server, without its sockets."""
    registry = CollectorRegistry()
    batcher = Batcher(most_waiting=limits.most_waiting)
    waiting = Gauge("evenhand_queries_waiting", "Queries in the queue.", registry=registry)
    waiting.set_function(lambda: batcher.num_waiting)
    batch = Gauge("evenhand_batch_size", "Queries of the last batch.", registry=registry)
    batch.set_function(lambda: batcher.last_size)
    reloads = Counter("evenhand_reloads", "Reloads.", ["outcome"], registry=registry)

    is_reloading = asyncio.Lock()

    async def reload() -> None:
        async with is_reloading:
            refused = await asyncio.to_thread(runs.reload)
        for sentence in refused:
            print(f"evenhand: {sentence}", file=sys.stderr, flush=True)
        reloads.labels("refused" if refused else "done").inc()
        print(f"evenhand: runs reloaded, {len(refused)} refused", file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = {asyncio.create_task(asyncio.to_thread(runs.find_examples))}
        had_terminal = sys.stdin is not None and sys.stdin.isatty()

        def hang_up() -> None:
            if had_terminal and not sys.stdin.isatty():  # it was closed: that is the end
                os.kill(os.getpid(), signal.SIGTERM)
            task = asyncio.create_task(reload())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
        yield

    app = FastAPI(
        title="Evenhand",
        version=__version__,
        description='Ask trained runs. Errors are `{"detail": "a sentence"}`.',
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> Response:
        """The first mistake, and never what was sent: it may be no text at all."""
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            mistake = f"{first['ctx']['error']}, character {first['loc'][-1]}"
            return problem(422, f"the body is not JSON ({mistake})")
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        sentence = str(first["msg"]).removeprefix("Value error, ")
        return problem(422, f"{where}: {sentence}" if where else sentence)

    async def answers(request: Request, asked: SearchRequest | EncodeRequest, work: Work) -> Any:
        request.state.num_queries = len(asked.queries)
        try:
            async with asyncio.timeout(limits.seconds):
                return await batcher.answers(work, asked.queries)
        except QueueFullError:
            sentence = "too many queries are waiting; come again in a second"
            raise HTTPException(503, sentence, {"Retry-After": "1"}) from None
        except UserError as error:  # of a database: its words may tell where it is
            print(f"evenhand: {error}", file=sys.stderr, flush=True)
            sentence = "the index does not answer; the server's log says why"
            raise HTTPException(503, sentence, {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(504, f"no answer within {limits.seconds:g} seconds") from None

    busy = _problems(404, 413, 503, 504)

    @app.post("/search", response_model=SearchResponse, responses=busy)
    async def search(asked: SearchRequest, request: Request) -> Response:
        """The best labels for each query, best first."""
        if asked.explain and len(asked.queries) > 1:
            raise HTTPException(422, "explain: goes with one query at a time")
        work = Work(runs.find(asked.run), asked.num_results, asked.explain)
        found = await answers(request, asked, work)
        return _json({"run": work.run.name, "results": found})

    @app.post("/encode", response_model=EncodeResponse, responses=busy)
    async def encode(asked: EncodeRequest, request: Request) -> Response:
        """A vector for each query: its product with a label's vector is the score, less a bias."""
        work = Work(runs.find(asked.run))
        return _json({"run": work.run.name, "vectors": await answers(request, asked, work)})

    @app.get("/runs", response_model=list[RunInfo], responses=_problems())
    async def list_runs() -> Response:
        """The runs that are served."""
        return _json([run.describe() for run in runs.by_name.values()])

    @app.get("/runs/{name}/map", response_model=WorldMap, responses=_problems(404))
    async def world_map(name: str) -> Response:
        """Where the labels of a run are, as a path of dots."""
        run = runs.find(name)
        drawn = await asyncio.to_thread(lambda: run.world_map)
        if drawn is None:
            raise HTTPException(404, "the labels of this run have no places")
        return _json(drawn)

    @app.get("/runs/{name}/report", response_class=Response, responses=_problems(404))
    async def report(name: str) -> Response:
        """The run's report, a page of HTML."""
        path = runs.find(name).report_path()
        if path is None:
            raise HTTPException(404, f"there is no report; write it: evenhand report {name}")
        return FileResponse(path, headers={"content-security-policy": REPORT_POLICY})

    @app.get("/examples", response_model=list[Example], responses=_problems())
    async def examples() -> Response:
        """Test queries that one run answers and another does not, where both were evaluated."""
        return _json(runs.examples)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": Problem}})
    async def ready() -> dict[str, str]:
        """There is room for a request."""
        if batcher.num_waiting >= batcher.most_waiting:
            raise HTTPException(503, "the queue is full")
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response, responses=_problems())
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return Gate(app, limits, registry, api_key=api_key, is_local=is_local, log_fn=log_fn)


# --- the process ----------------------------------------------------------------------------------


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0: any that is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        # Inherited by every connection; asyncio sets it only where a socket names its protocol.
        # Without it an answer's body waits for the client's word that its head has come: 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"cannot listen at {host}, port {port} ({getattr(error, 'strerror', error)}); choose "
            f"another --port or --host"
        ) from error


class Server(uvicorn.Server):
    started_fn: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_fn()


def run_server(
    app: ASGIApp,
    limits: Limits,
    listener: socket.socket,
    started_fn: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or Ctrl-C, and then until the requests in flight are answered.

    Args:
        started_fn: called when the server answers, and obeys signals.
    """
    _allow_files(limits.most_connections + BACKLOG + 200)  # all that wait are accepted at once
    config = uvicorn.Config(
        app,
        http=protocol_within(limits),
        log_level="error",  # a client's mistakes are in the log of requests
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else whoever is on this machine can be any address
        timeout_graceful_shutdown=int(limits.seconds) + 1,
        backlog=BACKLOG,
        ws="none",
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it is done
        signal.signal(number, lambda number, frame: sys.exit(0))
    gc.collect()
    gc.freeze()  # else every search for garbage goes through all modules and stops everything
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one core reads and writes
    sys.setswitchinterval(0.0005)  # seconds that a short call of the worker waits for Python's lock
    server = Server(config)
    server.started_fn = started_fn
    server.run([listener])


def _allow_files(count: int) -> None:
    """Raises the limit of open files, of which every connection is one."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
        except (ValueError, OSError) as error:
            raise UserError(
                f"so many connections need {count:,} open files, and this system allows {hard:,}; "
                f"choose fewer --max-connections, or raise the limit: ulimit -Hn {count}"
            ) from error

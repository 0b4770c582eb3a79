"""What every request passes: key, rate and size; and what every answer gets: headers, log, metrics.

The log says when, which route, which status, how long and how many queries; never what was asked,
nor by whom.
"""

import dataclasses
import hmac
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from ipaddress import ip_address
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may ask for, and all of them together."""

    most_connections: int = 1000
    most_waiting: int = 1024  # queries in the queue
    seconds: float = 10.0  # a request may wait, and may take to arrive
    rate: float | None = None  # requests a second from one address
    body_bytes: int = 2**20
    query_length: int = 1000  # characters
    num_queries: int = 100  # in a request
    num_results: int = 100


OPEN = ("/health", "/ready")  # without a key, beside the page, which holds no data
PROTECTED = ("/search", "/encode", "/runs", "/examples", "/metrics")
MOST_CLIENTS = 10_000  # remembered by their rate
BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)  # seconds
SECURITY = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; "
    b"img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


def problem(status: int, sentence: str, **headers: str) -> Response:
    """An error as all of them look: {"detail": a sentence}."""
    return JSONResponse({"detail": sentence}, status, headers)


class RateLimit:
    """A bucket for each client: `rate` requests a second, and as many saved up for one second.

    Example:
        >>> limit = RateLimit(1.0)
        >>> [limit.allows("a", now) for now in (0.0, 0.5, 1.6)]
        [True, False, True]
    """

    def __init__(self, rate: float) -> None:
        self.rate, self.most = rate, max(1.0, rate)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, time

    def allows(self, client: str, now: float) -> bool:
        tokens, before = self._buckets.pop(client, (self.most, now))
        tokens = min(self.most, tokens + (now - before) * self.rate)
        is_allowed = tokens >= 1
        self._buckets[client] = (tokens - is_allowed, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)  # the one that has not come for the longest time
        return is_allowed


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        registry: CollectorRegistry,
        *,
        api_key: str | None = None,
        is_local: bool = False,
        log_fn: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            is_local: answers only requests to localhost or to an address, not to other names.
        """
        self.app, self.limits, self.log_fn = app, limits, log_fn
        self.is_local = is_local
        self.key = None if api_key is None else f"Bearer {api_key}".encode()
        self.rate = None if limits.rate is None else RateLimit(limits.rate)
        ProcessCollector(registry=registry)
        self.seconds = Histogram(
            "evenhand_request_seconds", "Time of a request.", ["route"],
            registry=registry, buckets=BUCKETS,
        )  # fmt: skip
        self.requests = Counter(
            "evenhand_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self.queries = Counter("evenhand_queries", "Queries answered.", registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, num_bytes = time.perf_counter(), 0, 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                added = [item for item in SECURITY.items() if item[0] not in own]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.limits.body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, send_with_headers)
            else:
                await self.app(scope, receive_within_limit, send_with_headers)
        except Exception:  # a mistake of ours: told to whoever runs the server, not to the client
            traceback.print_exc()
            if not status:
                answer = problem(500, "the server made a mistake; its log says which")
                await answer(scope, receive, send_with_headers)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path = dict(scope["headers"]), scope["path"]
        if self.is_local and not _is_this_machine(headers.get(b"host", b"").decode("latin-1")):
            sentence = (
                "this server answers to the name localhost; for others start it with --api-key-env"
            )
            return problem(421, sentence)
        if self.rate is not None and path not in OPEN:
            client = scope["client"][0] if scope.get("client") else ""
            if not self.rate.allows(client, time.monotonic()):
                sentence = f"at most {self.limits.rate:g} requests a second from one address"
                return problem(429, sentence, **{"Retry-After": "1"})
        if self.key is not None and path.startswith(PROTECTED):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self.key):
                wanted = {"WWW-Authenticate": "Bearer"}
                return problem(401, "a key is needed: Authorization: Bearer KEY", **wanted)
        length = headers.get(b"content-length", b"0")
        if int(length) > self.limits.body_bytes:  # h11 lets digits pass, and nothing else
            return problem(413, self._too_large())
        return None

    def _too_large(self) -> str:
        return f"a request must not be larger than {self.limits.body_bytes:,} bytes"

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # The template of the route: a path might hold what somebody asked for.
        route = getattr(scope.get("route"), "path", "") or "other"
        num_queries = scope.get("state", {}).get("num_queries", 0)
        self.seconds.labels(route).observe(seconds)
        self.requests.labels(route, str(status or "gone")).inc()
        if status == 200:
            self.queries.inc(num_queries)
        if self.log_fn is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self.log_fn(f"{now} {route} {status} {1000 * seconds:.1f} ms {num_queries} queries")


def _is_this_machine(host: str) -> bool:
    """False for other names: any site can let its own name point to this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def print_log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

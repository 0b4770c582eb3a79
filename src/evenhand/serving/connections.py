"""HTTP connections, of which there are only so many, and none takes for ever to send a request.

uvicorn's own limit refuses requests of everybody once there are too many connections, and it waits
for the end of a request's header or body as long as the client likes.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from evenhand.serving.gate import Limits

SENTENCE = b'{"detail":"too many connections; come again in a second"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(SENTENCE), SENTENCE)
)


def protocol_within(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits."""

    class LimitedProtocol(H11Protocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.is_refused = False
            self.deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if len(self.connections) >= limits.most_connections:
                self.is_refused = True
                transport.write(FULL)
                transport.close()
                return
            super().connection_made(transport)
            self.deadline = self.loop.call_later(limits.seconds, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self.is_refused:
                return
            super().data_received(data)
            is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
            if is_arriving and self.deadline is None:
                self.deadline = self.loop.call_later(limits.seconds, self.transport.abort)
            elif not is_arriving:
                self._stop_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            if not self.is_refused:
                super().connection_lost(exc)

        def _stop_clock(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return LimitedProtocol

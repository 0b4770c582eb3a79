"""Limits on HTTP connections: how many there are, and how long one may do nothing.

uvicorn's own limit refuses everybody's requests once there are too many connections, and it waits
for ever for the end of a request, and for the client to read the answer.
"""

import asyncio

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from evenhand.serving.gate import Limits

ON_ITS_WAY = 0.5  # seconds for requests from clients that do not know yet that it stops
SENTENCE = b'{"detail":"too many connections; come again in a second"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(SENTENCE), SENTENCE)
)


def protocol_within(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits."""

    class LimitedProtocol(H11Protocol):
        """Aborts connections that are too slow.

        A request has twice `limits.seconds` from its first byte to the end of its answer; each time
        the client reads some of a long answer, the clock starts again.
        """

        clock: asyncio.TimerHandle | None = None
        is_refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if len(self.connections) >= limits.most_connections:
                self.is_refused = True
                transport.write(FULL)
                transport.close()
                return
            super().connection_made(transport)
            self._restart_clock()

        def data_received(self, data: bytes) -> None:
            if self.is_refused:
                return
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                self._restart_clock()  # a request begins
            super().data_received(data)

        def send_400_response(self, msg: str) -> None:
            try:
                super().send_400_response(msg)
            except h11.LocalProtocolError:  # the answer was sent before the rest turned out wrong
                self.transport.abort()

        def resume_writing(self) -> None:  # some of a long answer was read
            super().resume_writing()
            self._restart_clock()

        def on_response_complete(self) -> None:
            self._restart_clock()
            super().on_response_complete()

        def shutdown(self) -> None:
            """Still answers requests on their way, with `connection: close`, then closes."""
            headers = self.server_state.default_headers
            if CLOSE_HEADER not in headers:
                headers.append(CLOSE_HEADER)
            self.loop.call_later(ON_ITS_WAY, self._close)

        def _close(self) -> None:
            if not self.transport.is_closing():
                super().shutdown()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.clock is not None:
                self.clock.cancel()
            if not self.is_refused:
                super().connection_lost(exc)

        def _restart_clock(self) -> None:
            if self.clock is not None:
                self.clock.cancel()
            self.clock = self.loop.call_later(2 * limits.seconds, self.transport.abort)

    return LimitedProtocol

"""A small HTTP server for the tests of downloads, which can be told to misbehave."""

import contextlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Serves one body. What was asked of it is in `requests`: the headers, in order."""

    def __init__(self, body):
        self.body = body
        self.etag = '"one"'
        self.last_modified = None
        self.knows_ranges = True
        self.ignores_if_range = False
        self.knows_length = True
        self.content_type = "application/octet-stream"
        self.cut_after = []  # of the first answers: how many bytes come before the line breaks
        self.status = []  # of the first requests: another status than 200 or 206
        self.content_range = None  # a lie
        self.redirect = None
        self.after_answer = None  # called after each answer
        self.requests = []

    def answer(self, handler):
        self.requests.append(dict(handler.headers))
        status = self.status.pop(0) if self.status else None
        if self.redirect and handler.path != "/moved":
            handler.send_response(302)
            handler.send_header("Location", self.redirect)
            handler.end_headers()
        elif status:
            handler.send_error(status)
        else:
            self.send_body(handler)
        if self.after_answer:
            self.after_answer()

    def send_body(self, handler):
        start, wanted = 0, handler.headers.get("Range")
        version = handler.headers.get("If-Range")
        is_same = version in (None, self.etag, self.last_modified) or self.ignores_if_range
        if wanted and self.knows_ranges and is_same:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(self.body):
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(self.body)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        handler.send_response(206 if start else 200)
        if start:
            honest = f"bytes {start}-{len(self.body) - 1}/{len(self.body)}"
            handler.send_header("Content-Range", self.content_range or honest)
        if self.knows_length:
            handler.send_header("Content-Length", str(len(self.body) - start))
        for name, value in (
            ("ETag", self.etag),
            ("Last-Modified", self.last_modified),
            ("Content-Type", self.content_type),
        ):
            if value:
                handler.send_header(name, value)
        handler.end_headers()
        end = start + self.cut_after.pop(0) if self.cut_after else len(self.body)
        handler.wfile.write(self.body[start:end])
        handler.close_connection = True


class Server(ThreadingHTTPServer):
    # Closing waits for the answers, or one could still fail after its test, and blame another.
    daemon_threads = False

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # who refuses a file hangs up
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served(body):
    """(address, server)"""
    server = FileServer(body)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.answer(self)

        def log_message(self, *arguments):
            pass

    httpd = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/data.bin", server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()

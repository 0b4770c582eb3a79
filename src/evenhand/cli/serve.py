"""`evenhand serve`; the server is in `evenhand.serving`."""

import os
from ipaddress import ip_address
from typing import Annotated

from evenhand.cli import options
from evenhand.cli.options import flag
from evenhand.errors import UserError


def serve(
    runs: options.RunFolders,
    host: Annotated[str, flag("Address to listen at; 0.0.0.0: of every network.")] = "127.0.0.1",
    port: Annotated[int, flag("Port to listen at.", min=0)] = 8000,
    api_key_env: Annotated[
        str | None, flag("Environment variable that holds the key clients must send.")
    ] = None,
    rate: Annotated[
        float | None, flag("Most requests a second from one address.", show_default="no limit")
    ] = None,
    timeout: Annotated[float, flag("Seconds that a request may wait for its answer.")] = 10.0,
    max_connections: Annotated[int, flag("Most open connections.", min=1)] = 1000,
    max_waiting: Annotated[int, flag("Most queries in the queue.", min=1)] = 1024,
    quiet: Annotated[bool, flag("Write no log of requests.", "--quiet")] = False,
    index: options.Index = None,
    device: options.Device = None,
) -> None:
    """Serve trained models to programs, and to people as a page.

    Runs in the foreground until Ctrl-C or SIGTERM; SIGHUP loads the runs anew.
    """
    from evenhand.cli.console import console

    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed; install what serving needs: "
            f"pip install 'evenhand[serve]'"
        ) from error

    from evenhand.build import choose_device
    from evenhand.serving.gate import Limits, print_log
    from evenhand.serving.server import Runs, make_app, open_listener, run_server

    for name, value in (("--rate", rate), ("--timeout", timeout)):
        if value is not None and not 0 < value < 1e6:
            raise UserError(f"{name} must be between 0 and a million, got {value}")
    if port > 65535:
        raise UserError(f"--port must be between 0 and 65535, got {port}")
    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise UserError(f"--api-key-env {api_key_env}: there is no such variable, or it is empty")
    limits = Limits(
        most_connections=max_connections, most_waiting=max_waiting, seconds=timeout, rate=rate
    )
    listener = open_listener(host, port)  # before the runs are read, which takes a while
    served = Runs(runs, device=choose_device(device), index=index)
    host, port = listener.getsockname()[:2]
    is_local = ip_address(host).is_loopback and key is None
    if not is_local and key is None:
        console.print(f"whoever reaches {host}:{port} can ask these runs; see --api-key-env")
    log_fn = None if quiet else print_log
    app = make_app(served, limits, api_key=key, is_local=is_local, log_fn=log_fn)
    shown = f"[{host}]" if ":" in host else host
    sentence = f"serving {', '.join(served.by_name)}: http://{shown}:{port}"
    run_server(app, limits, listener, lambda: console.print(sentence))

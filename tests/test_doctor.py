"""Every line of the doctor's table can fail, and does here."""

import types

import pytest

from evenhand.cli import doctor
from evenhand.cli.doctor import BROKEN, MISSING, OK, SLOW


def gives(value):
    return lambda *_: value


def gpu(free):
    sizes = free * 2**30, 139 * 2**30
    return {**HAS_GPU, "torch.cuda.mem_get_info": gives(sizes)}


def cache(**path):
    kernel = types.SimpleNamespace(_cache=types.SimpleNamespace(**path))
    return {"evenhand.kernels.rows._unit_rows_compiled": kernel}


def threads(num_cores):
    return {"torch.get_num_threads": gives(8), "evenhand.cli.doctor.usable_cores": gives(num_cores)}


HAS_GPU = {"torch.cuda.is_available": gives(True), "torch.cuda.get_device_name": gives("H200")}
NO_GPU = {"torch.cuda.is_available": gives(False)}
CHECKS = [  # check, what it meets, what it finds, and words of that or of the remedy
    ("gpu", NO_GPU | {"torch.version.cuda": None}, MISSING, "without CUDA"),
    ("gpu", NO_GPU | {"torch.version.cuda": "12.8"}, MISSING, "no GPU is seen"),
    ("gpu", gpu(130), OK, "H200, 130.0 GiB of 139.0 GiB free"),
    ("gpu", gpu(13), SLOW, "H200"),
    ("compile_cache", cache(cache_path="."), OK, "kept in ."),
    ("compile_cache", cache(cache_path="gone"), SLOW, "NUMBA_CACHE_DIR"),
    ("compile_cache", cache(), SLOW, "nowhere to keep it"),
    ("threads", threads(1.5), SLOW, "8 for 1.5 cores OMP_NUM_THREADS=1:"),
    ("threads", threads(8.0), OK, "8 for 8 cores"),
]


@pytest.mark.parametrize(("check", "patches", "state", "words"), CHECKS)
def test_every_check_finds_what_is_there(tmp_path, monkeypatch, check, patches, state, words):
    monkeypatch.chdir(tmp_path)
    for name, value in patches.items():
        monkeypatch.setattr(name, value)
    finding = getattr(doctor, f"check_{check}")()
    assert finding.state == state, finding
    assert words in f"{finding.found} {finding.remedy}"
    assert finding.remedy or state == OK


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
        finding = doctor.run_self_test(code, timeout=timeout)
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

"""Damaged, odd and hostile inputs: every parser reads them rightly or refuses them.

The corpus is replayed, and Hypothesis looks a little further; a campaign (see CONTRIBUTING.md) much
further. Below are the inputs that once did harm, each with what it must come to.
"""

import io
import json
import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings

from evenhand.errors import UserError
from fuzz import record_targets
from fuzz.array_targets import ARRAYS, RANKER
from fuzz.inputs import corpus_of, inputs_of
from fuzz.registry import TARGETS
from fuzz.target import forget_scratch, scratch

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # numpy's remarks


@pytest.fixture(scope="module", autouse=True)
def no_files_left():
    scratch()
    yield
    forget_scratch()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_corpus_and_damaged_inputs_are_read_or_refused(name):
    target = TARGETS[name]
    for data in target.seeds:
        assert target.check_fn(data) is None
    for data in corpus_of(name):
        target.check_fn(data)

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=inputs_of(target))
    def look(data):
        target.check_fn(data)

    look()


# --- what did harm --------------------------------------------------------------------------------


def changed_ranker(**arrays):
    return safetensors.numpy.save(RANKER | arrays)


def array_of(name, values, dtype=np.int64):
    file = io.BytesIO()
    np.save(file, np.array(values, dtype))
    return bytes([ARRAYS.index(f"{name}.npy")]) + file.getvalue() if name else file.getvalue()


def changed_score(**values):
    return json.dumps([record_targets.SCORE | values]).encode()


LZMA_ZIP = TARGETS["compressed"].seeds[-1]
DEEP = (b"[" * 5000, b"9" * 5000, b'["\\ud800"]', b"[" * 60 + b"]" * 60)
HARM = [
    *(("json", data, "damaged") for data in DEEP),
    *(("metrics", data + b"\n", "is damaged") for data in DEEP),
    *(("metrics", line + b"\n", "is damaged") for line in (b"[1]", b"{}", b'{"step": "1"}')),
    *(
        ("run-json", b'{"dataset": {}, "training_seconds": %s}' % seconds, "training_seconds")
        for seconds in (b'"3"', b"1e999", b"-1", b"[]")
    ),
    ("scores-json", changed_score(value="1"), "damaged"),
    ("scores-json", changed_score(members=[1]), "damaged"),
    ("config", b"[training]\nseed = 0x" + b"f" * 5000, "below 2"),
    ("config", b"[training]\nnum_steps = 1" + b"0" * 400, "below 2"),
    ("config", b"[data]\ndataset = 0x" + b"f" * 5000, "bits"),
    ("config", b"a = " + b"[" * 2000, "not valid TOML"),
    ("config", b"a." * 20000 + b"a = 1", "dots"),
    ("assignments", b"risk.group=" + b"." * 1001, "risk.group has more than 1000 dots"),
    ("assignments", b"data.dataset=\xff", "UTF-8"),
    ("group-files", b"id\ta\ta\n1\tx\ty\n2\tx\ty\n3\tx\ty\n", "different names"),
    ("compressed", LZMA_ZIP.replace(b"?\x03?\x00", b"?\x03\xff\x00"), "not a whole"),
    ("outcome-npz", array_of("", [0.0]), "damaged"),  # an array alone
    # Differences overflow: compiled code read beyond memory.
    ("ranker", changed_ranker(offsets=np.array([0, 2**63 - 1, -2, 3, 4])), "damaged"),
    # 64 bits wide: it became feature 4.
    ("ranker", changed_ranker(features=np.array([0, 1, 2**32 + 4, 2])), "damaged"),
    ("ranker", changed_ranker(features=np.zeros((4, 2), np.int32)), "damaged"),
    ("ranker", changed_ranker(values=np.zeros((4, 2), np.float32)), "damaged"),
    ("ranker", changed_ranker(offsets=np.array(3)), "damaged"),
    ("ranker", changed_ranker(biases=np.array([0, 0, math.nan, 0], np.float32)), "damaged"),
    ("dataset-array", array_of("train.features.offsets", [0, 2, 4, 6, 8, 10, 13]), "to 12"),
    *(
        ("dataset-array", array_of("train.positives.ids", [0, 1, 2, 3, 0, wrong], np.int32), "dam")
        for wrong in (-1, 4, 2**31 - 1)
    ),
]


@pytest.mark.parametrize(("name", "data", "word"), HARM, ids=[f"{h[0]}-{h[2]}" for h in HARM])
def test_what_did_harm_is_refused(name, data, word):
    refusal = TARGETS[name].check_fn(data)
    assert isinstance(refusal, UserError)
    assert word in str(refusal)

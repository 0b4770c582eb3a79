"""Damaged, odd and hostile inputs: every parser reads them rightly or refuses them.

The corpus is replayed, and Hypothesis looks a little further; a campaign (see CONTRIBUTING.md) much
further. Below are the inputs that once did harm, each with what it must come to.
"""

import io
import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings

from evenhand.config import build_config, read_settings, with_assignments
from evenhand.data import open_dataset
from evenhand.data.checks import check_all_ids
from evenhand.data.extreme import _read_groups
from evenhand.data.public_data import check_archive
from evenhand.data.text import MAX_MARKS, _stream_safe, featurizer_from, normalize
from evenhand.errors import UserError
from evenhand.evaluation import load_outcome
from evenhand.files import parse_json, read_json
from evenhand.run_folder import read_about, read_metrics, read_scores
from evenhand.search.ranker import load_ranker
from evenhand.tuning.space import parse_space
from fuzz import array_targets, network_targets
from fuzz.inputs import corpus_of, inputs_of
from fuzz.registry import TARGETS
from fuzz.target import forget_scratch, scratch

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # numpy's remarks
every_target = pytest.mark.parametrize("name", TARGETS)


@pytest.fixture(scope="module", autouse=True)
def no_files_left():
    scratch()
    yield
    forget_scratch()


# --- all parsers ----------------------------------------------------------------------------------


@every_target
def test_the_seeds_are_read_and_the_corpus_is_read_or_refused(name):
    target = TARGETS[name]
    for data in target.seeds:
        assert target.check_fn(data) is None
    for data in corpus_of(name):
        target.check_fn(data)


@every_target
def test_hypothesis_finds_nothing_either(name):
    target = TARGETS[name]

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


def written(tmp_path, name, data):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return path


@pytest.mark.parametrize("text", ["[" * 5000, "9" * 5000, '["\\ud800"]', "[" * 60 + "]" * 60])
def test_json_that_no_program_writes_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="damaged"):
        read_json(written(tmp_path, "a.json", text))
    with pytest.raises(UserError, match="line 1: is damaged"):
        read_metrics(written(tmp_path, "metrics.jsonl", f"{text}\n"))


def test_json_in_other_scripts_is_read():
    assert parse_json('{"a": ["\\ud83d\\ude00", "é", null]}') == {"a": ["😀", "é", None]}


def test_a_line_of_metrics_is_ended_by_a_newline_alone(tmp_path):
    path = written(tmp_path, "metrics.jsonl", '{"step": 1, "a": "\u2028\x85"}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "1"}'])
def test_a_line_of_metrics_without_a_step_is_refused(tmp_path, line):
    with pytest.raises(UserError, match="does not name its step"):
        read_metrics(written(tmp_path, "metrics.jsonl", f"{line}\n"))


@pytest.mark.parametrize("seconds", ['"3"', "1e999", "-1", "[]"])
def test_a_run_that_took_no_number_of_seconds_is_refused(tmp_path, seconds):
    written(tmp_path, "run.json", f'{{"dataset": {{}}, "training_seconds": {seconds}}}')
    with pytest.raises(UserError, match="training_seconds"):
        read_about(tmp_path)


def test_scores_of_other_types_are_refused(tmp_path):
    row = (
        '"metric": "m", "column": "c", "group": "g", "low": null, "high": null, "count": 1, '
        '"is_judged": true'
    )
    for rest in ('"value": "1", "members": []', '"value": 1, "members": [1]'):
        with pytest.raises(UserError, match="damaged"):
            read_scores(written(tmp_path, "scores.json", f"[{{{row}, {rest}}}]"))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"[training]\nseed = 0x{'f' * 5000}", "below 2"),
        (f"[training]\nnum_steps = 1{'0' * 400}", "below 2"),
        (f"[data]\ndataset = 0x{'f' * 5000}", "bits"),
        (f"a = {'[' * 2000}", "not valid TOML"),
        (f"{'a.' * 20000}a = 1", "dots"),
    ],
)
def test_settings_that_no_one_writes_are_refused(tmp_path, text, word):
    with pytest.raises(UserError, match=word):
        build_config(read_settings(written(tmp_path, "a.toml", text)))


def test_a_setting_that_is_not_unicode_cannot_be_written_down_and_is_refused():
    with pytest.raises(UserError, match="UTF-8"):
        build_config(with_assignments({}, ["data.dataset=\udcff"]))


@pytest.mark.parametrize("word", ['" b",c', '"true"', "a-b,c", "'1'", "0.5"])
def test_a_space_is_the_same_when_it_is_read_from_its_own_text(word):
    name = "loss.margin" if word == "0.5" else "risk.group"
    space = parse_space([f"{name}={word}"], build_config({}))
    assert parse_space([f"{name}={space[name]}"], build_config({})) == space


def test_columns_of_groups_with_one_name_are_refused(tmp_path):
    path = written(tmp_path, "groups.tsv", "id\ta\ta\n1\tx\ty\n")
    with pytest.raises(UserError, match="different names"):
        _read_groups(path, 1)


def test_very_many_combining_marks_are_normalised_in_time():
    text = "a" + "\u0301\u0316" * 60_000  # half a minute, when all are sorted at once
    assert len(normalize(text)) > 100_000
    long = "é" * 2000 + "a" + "\u0316\u0301" * (MAX_MARKS // 2)
    assert _stream_safe(long) == long


def test_a_featurizer_of_a_data_set_is_checked():
    whole = {"kind": "ngrams", "min_length": 1, "max_length": 4, "num_buckets": 10}
    changes = ({"min_length": 5}, {"max_length": 10**9}, {"num_buckets": "1"}, {"max_length": None})
    for change in changes:
        with pytest.raises(UserError, match="featurizer"):
            featurizer_from(whole | change)


@pytest.mark.parametrize("change", [(b"?\x03?\x00", b"?\x03\xff\x00"), (b"train", b"tra\x80n")])
def test_a_zip_archive_that_zipfile_cannot_read_is_refused(tmp_path, change):
    data = TARGETS["zip"].seeds[2]
    assert change[0] in data
    with pytest.raises(UserError, match="not a whole"):
        check_archive(written(tmp_path, "a.zip", data.replace(*change)))


def test_a_file_that_is_an_array_alone_is_no_evaluation(tmp_path):
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    written(tmp_path, "outcome.npz", file.getvalue())
    with pytest.raises(UserError, match="damaged"):
        load_outcome(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([0, 2**63 - 1, -2, 3, 4])},  # differences overflow: read beyond memory
        {"features": np.array([0, 1, 2**32 + 4, 2])},  # 64 bits wide, became feature 4
        {"features": np.zeros((4, 2), np.int32)},
        {"values": np.zeros((4, 2), np.float32)},
        {"offsets": np.array(3)},
        {"biases": np.array([0, 0, math.nan, 0], np.float32)},
    ],
)
def test_a_ranker_that_compiled_code_would_read_beyond_is_refused(tmp_path, change):
    data = safetensors.numpy.save(array_targets.RANKER | change)
    written(tmp_path, "model/ranker.safetensors", data)
    with pytest.raises(UserError, match="damaged"):
        load_ranker(tmp_path / "model/ranker.safetensors", num_features=5, num_labels=4)


def changed_dataset(tmp_path, name, array):
    for path, data in array_targets._dataset_files().items():
        written(tmp_path, path, data)
    np.save(tmp_path / f"{name}.npy", array)
    return tmp_path


def test_arrays_of_a_data_set_must_belong_together(tmp_path):
    offsets = np.array([0, 2, 4, 6, 8, 10, 13])
    with pytest.raises(UserError, match="must go from 0 to 12"):
        open_dataset(changed_dataset(tmp_path, "train.features.offsets", offsets))


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_labels_that_are_not_there_are_refused(tmp_path, wrong):
    ids = np.array([0, 1, 2, 3, 0, wrong], np.int32)
    dataset = open_dataset(changed_dataset(tmp_path, "train.positives.ids", ids))
    for use in (dataset.label_counts, lambda: check_all_ids(dataset)):
        with pytest.raises(UserError, match="is damaged"):
            use()


@pytest.mark.parametrize(
    "headers",
    [
        b"302 Found\nLocation: http://[::1\n",
        b"302 Found\nLocation: http://" + b"a" * 70 + b"/\n",
        b"302 Found\nLocation: http://b/\nContent-Length: 99999999999999999999\n",
        b"200 OK\nContent-Length: " + b"9" * 5000 + b"\n",
    ],
)
def test_an_answer_of_a_server_that_cannot_be_followed_is_refused(headers):
    data = network_targets._input(b"u", b"HTTP/1.1 " + headers + b"\n")
    assert isinstance(TARGETS["http"].check_fn(data), UserError)

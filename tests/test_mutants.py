"""Tests must be able to fail: every small mistake listed here must make one fail.

For each mutant a copy of the package with one phrase changed is tested by the real test files, in
a process of its own. Importing torch takes seconds, so one process imports it and forks for every
mutant: run as a script, this file is that process.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
TESTED_BY = {
    "losses.py": "test_losses.py",
    "mining.py": "test_mining.py",
    "risk.py": "test_risk.py",
    "objective.py": "test_objective.py",
    "kernels/selection.py": "test_kernels.py",
    "models/retriever.py": "test_retriever.py",
    "training/step.py": "test_step.py",
}
SECONDS_FOR_A_TEST = 20
NUM_WORKERS = max(2, os.cpu_count() or 1)


class Mutant(NamedTuple):
    file: str
    old: str  # a phrase that occurs once
    new: str
    caught_by: str = ""  # pytest's -k, to save time: which tests of the file must catch it


MUTANTS = [
    Mutant("losses.py", "F.relu(1 - margins)\n", "F.relu(2 - margins)\n"),
    Mutant("losses.py", "F.relu(1 - margins).square()", "F.relu(1 - margins)"),
    Mutant("losses.py", "threshold=36", "threshold=20"),
    Mutant("losses.py", "torch.exp(-margins)", "torch.exp(margins)"),
    Mutant("losses.py", "return margin_loss(positive", "return margin_loss(-positive"),
    Mutant("losses.py", "margin_loss(-scores)", "margin_loss(scores)"),
    Mutant("losses.py", "    _require_decreasing(margin_loss)\n", "", "refused"),
    Mutant("losses.py", "negative_scores.amax(", "negative_scores.amin("),
    Mutant("losses.py", "logsumexp(dim=-1) -", "logsumexp(dim=-1) +"),
    Mutant("losses.py", "logsumexp(dim=-1)", "exp().sum(dim=-1).log()", "extreme"),
    Mutant("losses.py", "[positive_scores.unsqueeze(-1), negative_scores]", "[negative_scores]"),
    Mutant("losses.py", "_power(1 - positive", "_power(1 + positive", "contrastive"),
    Mutant("losses.py", "_power(scores - margin", "_power(scores + margin", "contrastive"),
    Mutant("losses.py", "margin: float = 0.3", "margin: float = 0.0", "default"),
    Mutant("losses.py", "not -1 <= margin", "not -1 < margin", "outermost"),
    Mutant("losses.py", "not power >= 1", "not power > 1", "contrastive"),
    Mutant("losses.py", "else F.relu(distances) **", "else distances.abs() **", "contrastive"),
    Mutant("losses.py", "negative_scores > -torch.inf", "negative_scores >= -torch.inf"),
    Mutant("losses.py", "negative_scores.masked_fill(~is_label, 0)", "negative_scores  #", "own"),
    Mutant("losses.py", "cost_fn(scores).masked_fill(~is_label, 0)", "cost_fn(scores)"),
    Mutant("losses.py", "costs.sum(dim=-1) /", "costs.amax(dim=-1) /"),
    Mutant("losses.py", "is_label.sum(dim=-1).clamp(min=1)", "negative_scores.shape[-1]"),
    Mutant("losses.py", ".clamp(min=1)", "", "without_negatives"),
    Mutant("losses.py", "linspace(-8, 8", "linspace(-8, 1", "refused"),
    Mutant("losses.py", "values.diff() <= 0", "values.diff() < 0"),
    Mutant("mining.py", "largest(negative_scores,", "largest(-negative_scores,"),
    Mutant("mining.py", "negative_scores, num_hard_labels)\n", "negative_scores, 1)\n"),
    Mutant("mining.py", "hard_examples, sorted=False", "hard_examples, largest=False"),
    Mutant("mining.py", "negative_scores.shape[-1]", "negative_scores.shape[0]"),
    Mutant("mining.py", "not 1 <= value", "not 0 <= value", "refused"),
    Mutant("mining.py", "value <= limit", "value < limit"),
    Mutant("mining.py", "is_same.any(", "is_same.all("),
    Mutant("mining.py", "is_positive | (sampled_ids < 0)", "is_positive"),
    Mutant("mining.py", "is_positive |", "is_positive &"),
    Mutant("mining.py", "sampled_ids < 0", "sampled_ids <= 0"),
    Mutant("risk.py", "1 / len(losses))", "1)"),
    Mutant("risk.py", "1 / num_hard_examples)", "1)"),
    Mutant("risk.py", "1 / num_hard_examples)", "1 / len(losses))"),
    Mutant("risk.py", "= hardest_examples(losses,", "= hardest_examples(-losses,"),
    Mutant("objective.py", "* losses).sum()", "* losses).mean()"),
    Mutant("objective.py", "hardest_labels(negative_scores,", "hardest_labels(-negative_scores,"),
    Mutant("objective.py", "negative_scores.gather(1, kept)", "negative_scores"),
    Mutant("objective.py", "negative_scores.gather", "negative_scores.detach().gather", "numeric"),
    Mutant("objective.py", "LossFn, softmax_loss", "LossFn, bowl_loss as softmax_loss", "default"),
    Mutant("objective.py", "(weights * loss_fn(positive,", "(loss_fn(positive,", "weighted"),
    Mutant("objective.py", "[positive, negative])", "[negative, positive])", "weighted"),
    Mutant("objective.py", "positive_scores.detach()", "positive_scores", "not_changed"),
    Mutant("kernels/selection.py", "folded.amax", "folded.amin"),
    Mutant("kernels/selection.py", "if FOLD * width <", "if FOLD * width >"),
    Mutant("kernels/selection.py", ".masked_fill(wanted < 0, 0)", "", "positive_slots"),
    Mutant("kernels/selection.py", "wanted < 0", "wanted <= 0", "positive_slots"),
    Mutant(
        "kernels/selection.py", "counts.cumsum(0) - counts)", "counts.cumsum(0))", "positive_slots"
    ),
    Mutant("models/retriever.py", "(gradients - along", "(gradients + along"),
    Mutant("models/retriever.py", "return self.scale * self.unit(", "return self.unit("),
    Mutant("training/step.py", "scores[:, sample.ids < 0] = -torch.inf", "pass", "product"),
    Mutant("training/step.py", "slots.columns] = -torch.inf", "slots.columns] += 0", "product"),
    Mutant("training/step.py", "return mask_positives(scores, sample.ids, ", "return (", "product"),
    Mutant("training/step.py", "scores += biases", "scores -= biases", "bias and product"),
    Mutant("training/step.py", "model.scale * vector_gradients", "vector_gradients", "product"),
    Mutant("training/step.py", "if is_log_q_corrected:", "if False:", "log and product"),
    Mutant(
        "training/step.py", "Entries(rows, inverse, ", "Entries(rows, inverse.flip(0), ", "product"
    ),
    Mutant("training/step.py", "vectors[mined.survivors]", "vectors[:len(mined.survivors)]", "dot"),
]


def label(mutant):
    return f"{mutant.file}: {mutant.old.strip()} -> {mutant.new.strip() or 'nothing'}"


# The process that forks


def write_mutant(package, folder, mutant):
    """A copy of the package with one phrase changed."""
    shutil.copytree(package, folder / "evenhand", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "evenhand" / mutant.file
    path.write_text(path.read_text("utf-8").replace(mutant.old, mutant.new), "utf-8")


def run_tests(folder, test_files, names):
    """In a process of its own: pytest on a copy of the package. Never returns."""
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    os.environ["EVENHAND_HYPOTHESIS_PROFILE"] = "quick"
    paths = [str(TESTS / name) for name in test_files]
    options = ["-x", "-q", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider", "-k", names]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Hypothesis is imported already
    status = pytest.main([*options, f"--timeout={SECONDS_FOR_A_TEST}", *paths])
    import evenhand

    assert Path(evenhand.__file__).is_relative_to(folder), evenhand.__file__
    os._exit(status)


def result_of(folder, wait_status):
    """(exit status of pytest or minus the signal, the line that says what failed)"""
    lines = (folder / "log").read_text("utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return os.waitstatus_to_exitcode(wait_status), (failed or lines[-1:] or [""])[0]


def run_all(package, work_dir):
    """The package as it is, which must pass, then every mutant: [(status, line), ...]."""
    import hypothesis  # noqa: F401  (imported here once, for every fork)
    import torch  # noqa: F401

    gc.freeze()  # or every fork would walk, and so copy, all of torch's objects
    # The package as it is goes first: it takes longest. Its step is tested as the mutants' are.
    as_it_is = (Mutant("losses.py", "", ""), sorted(TESTED_BY.values()), "not (fold or gather)")
    jobs = [(mutant, [TESTED_BY[mutant.file]], mutant.caught_by) for mutant in MUTANTS]
    waiting, running, results = list(enumerate([as_it_is, *jobs])), {}, {}
    while waiting or running:
        while waiting and len(running) < NUM_WORKERS:
            number, (mutant, test_files, names) = waiting.pop(0)
            folder = work_dir / str(number)
            write_mutant(package, folder, mutant)
            process = os.fork()
            if not process:
                try:
                    run_tests(folder, test_files, names)
                except BaseException:
                    traceback.print_exc()
                    os._exit(99)
            running[process] = number, folder
        process, wait_status = os.wait()
        number, folder = running.pop(process)
        results[number] = result_of(folder, wait_status)
        shutil.rmtree(folder)
    return [results[number] for number in range(len(results))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run_all(Path(sys.argv[1]), Path(name))))


# The tests


@pytest.fixture(scope="module")
def package():
    import evenhand

    return Path(evenhand.__file__).parent


@pytest.fixture(scope="module")
def results(package):
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    answer = subprocess.run(
        [sys.executable, __file__, str(package)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("mutant", MUTANTS, ids=label)
def test_every_mutant_can_be_made(package, mutant):
    count = (package / mutant.file).read_text("utf-8").count(mutant.old)
    assert count == 1, f"occurs {count} times in {mutant.file}: update MUTANTS, do not drop it"
    assert mutant.old != mutant.new


@pytest.mark.slow
def test_the_package_as_it_is_passes(results):
    status, line = results[0]
    assert status == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[label(mutant) for mutant in MUTANTS])
def test_every_mutant_is_caught(results, number):
    status, line = results[1 + number]
    # 1 is "a test failed"; anything else (did not import, ran for ever) would prove nothing.
    assert status == 1, f"status {status}: {line or 'survived'}"

"""Tests must be able to fail: every small mistake listed here must make one fail.

For each mutant a copy of the package with one phrase changed is tested by the real test files, in
a process of its own. Importing torch takes seconds, so one process imports it and forks for every
mutant: run as a script, this file is that process.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TESTED_BY = {
    "losses.py": "test_losses.py",
    "mining.py": "test_mining.py",
    "risk.py": "test_risk.py",
    "objective.py": "test_objective.py",
    "kernels/selection.py": "test_kernels.py",
    "training/step.py": "test_step.py",
    "models/retriever.py": "test_retriever.py",
}
SECONDS_FOR_ONE = 100
NUM_WORKERS = max(2, os.cpu_count() or 1)

MUTANTS = [  # file, a phrase that occurs once, what it becomes
    ("losses.py", "F.relu(1 - margins)\n", "F.relu(2 - margins)\n"),
    ("losses.py", "F.relu(1 - margins).square()", "F.relu(1 - margins)"),
    ("losses.py", "F.softplus(-margins, ", "F.softplus(margins, "),
    ("losses.py", "threshold=36", "threshold=20"),
    ("losses.py", "torch.exp(-margins)", "torch.exp(margins)"),
    ("losses.py", "return margin_loss(positive_scores)", "return margin_loss(-positive_scores)"),
    ("losses.py", "margin_loss(-scores)", "margin_loss(scores)"),
    ("losses.py", "    _require_decreasing(margin_loss)\n", ""),
    ("losses.py", "negative_scores.amax(", "negative_scores.amin("),
    ("losses.py", "scores.logsumexp(dim=-1) -", "scores.logsumexp(dim=-1) +"),
    ("losses.py", "scores.logsumexp(dim=-1)", "scores.exp().sum(dim=-1).log()"),
    ("losses.py", "[positive_scores.unsqueeze(-1), negative_scores]", "[negative_scores]"),
    ("losses.py", "_power(1 - positive_scores", "_power(1 + positive_scores"),
    ("losses.py", "_power(scores - margin", "_power(scores + margin"),
    ("losses.py", "margin: float = 0.3", "margin: float = 0.0"),
    ("losses.py", "power: float = 2.0", "power: float = 1.0"),
    ("losses.py", "not -1 <= margin", "not -1 < margin"),
    ("losses.py", "margin <= 1:", "margin < 1:"),
    ("losses.py", "not power >= 1", "not power > 1"),
    ("losses.py", "return F.relu(distances) if", "return distances if"),
    ("losses.py", "else F.relu(distances) ** power", "else distances.abs() ** power"),
    ("losses.py", "F.relu(distances) ** power", "F.relu(distances) * power"),
    ("losses.py", "negative_scores > -torch.inf", "negative_scores >= -torch.inf"),
    ("losses.py", "negative_scores.masked_fill(~is_label, 0)  #", "negative_scores  #"),
    ("losses.py", "cost_fn(scores).masked_fill(~is_label, 0)", "cost_fn(scores)"),
    ("losses.py", "costs.sum(dim=-1) /", "costs.amax(dim=-1) /"),
    ("losses.py", "is_label.sum(dim=-1).clamp(min=1)", "negative_scores.shape[-1]"),
    ("losses.py", ".clamp(min=1)", ""),
    ("losses.py", "linspace(-8, 8", "linspace(-8, 1"),
    ("losses.py", "values.diff() <= 0", "values.diff() < 0"),
    ("losses.py", "values.diff() <= 0).all()", "values.diff() <= 0).any()"),
    ("mining.py", "largest(negative_scores,", "largest(-negative_scores,"),
    ("mining.py", "largest(negative_scores, num_hard_labels)", "largest(negative_scores, 1)"),
    ("mining.py", "num_hard_examples, sorted=False", "num_hard_examples, largest=False"),
    ("mining.py", "negative_scores.shape[-1]", "negative_scores.shape[0]"),
    ("mining.py", "losses.shape[0]", "losses.shape[0] - 1"),
    ("mining.py", "not 1 <= value", "not 0 <= value"),
    ("mining.py", "value <= limit", "value < limit"),
    ("mining.py", "== sampled_ids", "!= sampled_ids"),
    ("mining.py", ").any(1)", ").all(1)"),
    ("mining.py", "is_positive | (sampled_ids < 0)", "is_positive"),
    ("mining.py", "is_positive | (sampled_ids < 0)", "sampled_ids < 0"),
    ("mining.py", "is_positive |", "is_positive &"),
    ("mining.py", "sampled_ids < 0", "sampled_ids <= 0"),
    ("mining.py", "(sampled_ids < 0), -torch.inf)", "(sampled_ids < 0), torch.inf)"),
    ("risk.py", "1 / len(losses))", "1)"),
    ("risk.py", "torch.full_like(losses, 1 / len(losses))", "losses / losses.sum()"),
    ("risk.py", "1 / num_hard_examples)", "1)"),
    ("risk.py", "1 / num_hard_examples)", "1 / len(losses))"),
    ("risk.py", "zeros_like", "ones_like"),
    ("risk.py", "= hardest_examples(losses,", "= hardest_examples(-losses,"),
    ("objective.py", "* losses).sum()", "* losses).mean()"),
    ("objective.py", "* losses).sum()", "* losses).amax()"),
    ("objective.py", "hardest_labels(negative_scores,", "hardest_labels(-negative_scores,"),
    ("objective.py", "negative_scores.gather(1, kept)", "negative_scores"),
    ("objective.py", "negative_scores.gather(1", "negative_scores.detach().gather(1"),
    ("objective.py", "(top_weights(losses,", "(1 - top_weights(losses,"),
    ("objective.py", "LossFn, softmax_loss", "LossFn, bowl_loss as softmax_loss"),
    ("objective.py", "(weights * loss_fn(positive, negative))", "loss_fn(positive, negative)"),
    ("objective.py", "torch.enable_grad()", "torch.no_grad()"),
    ("objective.py", "[positive, negative])", "[negative, positive])"),
    ("objective.py", "positive_scores.detach()", "positive_scores"),
    ("kernels/selection.py", "folded.amax", "folded.amin"),
    ("kernels/selection.py", "if FOLD * width <", "if FOLD * width >"),
    ("kernels/selection.py", "is_hit &= positive_ids >= 0", "is_hit &= positive_ids > 0"),
    ("kernels/selection.py", "        is_hit &= positive_ids >= 0\n", ""),
    ("kernels/selection.py", " & (places < len(sorted_ids))", ""),
    ("training/step.py", "    scores[:, sample.ids < 0] = -torch.inf\n", ""),
    ("training/step.py", "    scores[slots.rows, slots.columns] = -torch.inf\n", ""),
    ("training/step.py", "mask_positives(scores, sample.ids, batch.positive_ids)", "scores"),
    ("training/step.py", "scores += biases", "scores -= biases"),
    ("training/step.py", "scores = scores if biases is None else scores + biases", "pass"),
    ("training/step.py", "return scores if biases is None else scores + biases", "return scores"),
    ("training/step.py", "model.scale * vector_gradients", "vector_gradients"),
    ("training/step.py", "if is_log_q_corrected:", "if False:"),
    ("training/step.py", "accumulate=True", "accumulate=False"),
    ("training/step.py", "query_vectors[mined.survivors]", "query_vectors[: len(mined.survivors)]"),
    ("training/step.py", " weights[survivors], loss_fn", " weights[: len(survivors)], loss_fn"),
    ("models/retriever.py", "(gradients - along * units)", "(gradients + along * units)"),
    ("models/retriever.py", "(gradients - along * units)", "gradients"),
    ("models/retriever.py", "along * units) / norms", "along * units) * norms"),
    ("models/retriever.py", "return self.scale * self.unit(", "return self.unit("),
    ("models/retriever.py", "if not scale > 0", "if not scale >= 0"),
]  # fmt: skip


def label(mutant):
    file, old, new = mutant
    return f"{file}: {old.strip()} -> {new.strip() or 'nothing'}"


# The process that forks


def write_mutant(package, folder, mutant):
    """A copy of the package with one phrase changed."""
    shutil.copytree(package, folder / "evenhand", ignore=shutil.ignore_patterns("__pycache__"))
    file, old, new = mutant
    path = folder / "evenhand" / file
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")


def run_tests(folder, test_files):
    """In a process of its own: pytest on a copy of the package. Never returns."""
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.alarm(SECONDS_FOR_ONE)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    os.environ["EVENHAND_HYPOTHESIS_PROFILE"] = "quick"
    paths = [str(TESTS / name) for name in test_files]
    options = ["-x", "-q", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider"]
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # pytest is imported already
    status = pytest.main([*options, *ignored, *paths])
    import evenhand

    assert Path(evenhand.__file__).is_relative_to(folder), evenhand.__file__
    os._exit(status)


def result_of(folder, wait_status):
    """(exit status of pytest or minus the signal, the line that says what failed)"""
    lines = (folder / "log").read_text("utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return os.waitstatus_to_exitcode(wait_status), (failed or lines[-1:] or [""])[0]


def run_all(package, work_dir):
    """Every mutant, and last the package as it is, which must pass: [(status, line), ...]."""
    import hypothesis  # noqa: F401  (imported here once, for every fork)
    import torch  # noqa: F401

    jobs = [(mutant, [TESTED_BY[mutant[0]]]) for mutant in MUTANTS]
    jobs.append((("losses.py", "", ""), sorted(TESTED_BY.values())))
    jobs = list(enumerate(jobs))
    waiting, running, results = [jobs[-1], *jobs[:-1]], {}, {}  # the longest first
    while waiting or running:
        while waiting and len(running) < NUM_WORKERS:
            number, (mutant, test_files) = waiting.pop(0)
            folder = work_dir / str(number)
            write_mutant(package, folder, mutant)
            process = os.fork()
            if not process:
                try:
                    run_tests(folder, test_files)
                except BaseException:
                    traceback.print_exc()
                    os._exit(99)
            running[process] = number, folder
        process, wait_status = os.wait()
        number, folder = running.pop(process)
        results[number] = result_of(folder, wait_status)
        shutil.rmtree(folder)
    return [results[number] for number, _ in jobs]


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
    file, old, new = mutant
    count = (package / file).read_text("utf-8").count(old)
    assert count == 1, f"{old!r} occurs {count} times in {file}: update MUTANTS, do not drop it"
    assert old != new


@pytest.mark.slow
def test_the_package_as_it_is_passes(results):
    status, line = results[-1]
    assert status == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[label(mutant) for mutant in MUTANTS])
def test_every_mutant_is_caught(results, number):
    status, line = results[number]
    # 1 is "a test failed"; anything else (did not import, ran for ever) would prove nothing.
    assert status == 1, f"status {status}: {line or 'survived'}"

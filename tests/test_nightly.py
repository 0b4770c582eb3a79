"""`make nightly` can make every mutant, and finds the tests that must fail."""

from pathlib import Path

from nightly.mutants import MUTANTS
from nightly.mutation import find_stale, job_of


def test_every_mutant_can_be_made_and_has_its_tests():
    jobs = [job_of(mutant) for mutant in MUTANTS]
    assert not find_stale(jobs), "bring these up to date, or a mistake is no longer looked for"
    files = {job.test_file for job in jobs}
    assert not [file for file in files if not (Path(__file__).parent / file).is_file()]

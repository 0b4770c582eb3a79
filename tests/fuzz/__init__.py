"""Fuzzing of every parser: damaged, odd and hostile inputs, each read rightly or refused.

*_targets.py         what each target does with bytes, and what must be true of what it reads
registry.py          the targets by name: a function of bytes, and valid seeds
inputs.py            how Hypothesis makes an input from seeds and corpus
child.py             one target in a process of its own, by atheris
corpus/<target>/     inputs that reached new code, and every input that once did harm

`python -m tests.fuzz --help` starts a campaign; `tests/test_fuzz.py` replays the corpus and lets
Hypothesis look for a moment.
"""

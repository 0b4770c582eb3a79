"""Fuzzing of every parser: damaged, odd and hostile inputs, each read rightly or refused.

registry.py          the targets, by name: a function of bytes, valid seeds, words to splice in
*_targets.py         what each target does, and what must be true of what it reads
twins.py             slow, obvious parsers that must give the same answers
mutation.py          how an input is made from others
campaign.py          runs targets in processes of their own, and writes down what happened
corpus/<target>/     inputs that reached new code, and every input that once did harm

`python -m tests.fuzz --help` starts a campaign; `tests/test_fuzz.py` replays the corpus and lets
Hypothesis look as well.
"""

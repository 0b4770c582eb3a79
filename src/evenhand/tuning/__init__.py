"""Choosing settings on the validation part: a small search, its trials and the rule that chooses.

`space` says what is searched and which trials a seed gives, `trials` runs them, `choice` is the
rule alone, and `shares` is the advice for k' that needs no search.
"""

"""One target under atheris: `python -m tests.fuzz.atheris_child <target> <corpus> <options>`."""

import sys
import warnings
from random import Random

import atheris

with atheris.instrument_imports(include=["evenhand"]):
    from .registry import TARGETS
from .mutation import mutated
from .worker import corpus_of


def main() -> None:
    name = sys.argv.pop(1)
    target = TARGETS[name]
    warnings.simplefilter("ignore")
    inputs = [*target.seeds, *corpus_of(name)]

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        """Half of the changes know the format, the others are libFuzzer's own."""
        if seed % 2:
            return atheris.Mutate(data, max_size)
        return mutated(Random(seed), [data, data, *inputs], target.words)[:max_size]

    def check(data: bytes) -> None:
        target.check_fn(data)

    atheris.Setup(sys.argv, check, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Inputs by Hypothesis: seeds and corpus with a few places replaced, repeated or cut."""

import re
from pathlib import Path

from hypothesis import strategies as st

from .target import Target

MOST_BYTES = 2**14
_SHORT = (
    b"0 1 -1 -0 00 007 +1 255 256 65535 65536 2147483647 2147483648 4294967295 4294967296 "
    b"9223372036854775807 9223372036854775808 18446744073709551616 9999999999999999999 0.0 1.5 .5 "
    b"5. -2.5e-3 1e308 1e309 1e-400 1e999999999 3.4028235e38 3.5e38 16777217 0.1234567890123456789 "
    b"1e-45 1e-46 1.17549435e-38 340282356779733661637539395458142568448 "
    b"1_000 0o17 0b1 nan NaN inf -Infinity null true \xd9\xa3 \xc2\xb2 \xef\xbc\x91"
)
NUMBERS = [*_SHORT.split(), b"1" + b"0" * 400, b"9" * 4301, b"0x" + b"f" * 4000]
SEPARATORS = [
    b"\n", b"\r\n", b"\r", b"\t", b" ", b",", b":", b";", b"=", b".", b"..", b"/", b"\\", b'"',
    b"'", b'""', b"{", b"}", b"[", b"]", b"[[", b"]]", b'{"a":', b"(", b")", b"#", b"%", b"<",
    b"\x00", b"\x0b", b"\x0c", b"\x1c", b"\x85", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xff",
    b"\xc3", b"\xed\xa0\x80", b"\xcc\x81", b'"\\ud800"', b"../x",
]  # fmt: skip
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def corpus_of(name: str) -> list[bytes]:
    folder = Path(__file__).parent / "corpus" / name
    return [path.read_bytes() for path in sorted(folder.glob("*"))]


def words_of(target: Target) -> list[bytes]:
    """What the format is made of, taken from inputs of it; and what is odd in any format."""
    inputs = [*target.seeds, *corpus_of(target.name)]
    own = {word for data in inputs for word in re.findall(rb"[\w.@-]+|[^\w\s]+", data)}
    return sorted({word for word in own if len(word) <= 100} | {*NUMBERS, *SEPARATORS})


def inputs_of(target: Target) -> st.SearchStrategy[bytes]:
    """Valid inputs with one to five places replaced; and now and then bytes of any kind."""
    inputs = [*target.seeds, *corpus_of(target.name)]
    lines = sorted({line for data in inputs for line in data.split(b"\n")})
    words = st.sampled_from(words_of(target))
    fields = st.builds(
        lambda number, width, order: (number % 2 ** (8 * width)).to_bytes(width, order),
        st.sampled_from([*LENGTHS, *(-length for length in LENGTHS)]),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from(["little", "big"]),
    )
    repeated = st.builds(lambda word, times: word * times, words, st.sampled_from([2, 30, 3000]))
    pieces = st.one_of(
        st.just(b""), words, st.binary(max_size=3), fields, repeated, st.sampled_from(lines)
    )

    @st.composite
    def damaged(draw: st.DrawFn) -> bytes:
        data = draw(st.sampled_from(inputs))
        for _ in range(draw(st.integers(1, 5))):
            numbers = [found.span() for found in re.finditer(rb"[0-9]+", data)]
            if numbers and draw(st.booleans()):
                start, end = draw(st.sampled_from(numbers))
            else:
                start = draw(st.integers(0, len(data)))
                end = start + draw(st.integers(0, 12) | st.integers(0, len(data)))
            data = data[:start] + draw(pieces) + data[end:]
        return data[:MOST_BYTES]

    return damaged() | st.binary(max_size=200) | st.lists(words, max_size=6).map(b"".join)

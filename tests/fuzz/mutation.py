"""Making an input from others: bytes, numbers, words, lines, lengths, nesting."""

import re
from collections.abc import Sequence
from random import Random

NUMBER = re.compile(rb"[0-9]+")
MOST_BYTES = 2**14
NUMBERS = (
    b"0", b"1", b"-1", b"-0", b"00", b"007", b"+1", b"255", b"256", b"65535", b"65536",
    b"2147483647",
    b"2147483648", b"4294967295", b"4294967296", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551616", b"9" * 19, b"1" + b"0" * 400, b"9" * 4301, b"0x" + b"f" * 4000,
    b"0.0", b"1.5", b".5", b"5.", b"-2.5e-3", b"1e308", b"1e309", b"1e-400", b"1e999999999",
    b"3.4028235e38", b"3.5e38", b"16777217", b"0.1234567890123456789", b"1_000", b"0o17", b"0b1",
    b"nan", b"NaN", b"inf", b"-Infinity", b"null", b"true", b"\xd9\xa3", b"\xc2\xb2",
    b"\xef\xbc\x91",
)  # fmt: skip
SEPARATORS = (
    b"\n", b"\r\n", b"\r", b"\t", b" ", b"  ", b",", b":", b";", b"=", b".", b"..", b"/", b"\\",
    b'"',
    b"'", b'""', b"{", b"}", b"[", b"]", b"[[", b"]]", b"(", b")", b"#", b"\x00", b"\x0b", b"\x0c",
    b"\x1c", b"\x85", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xff", b"\xc3", b"\xed\xa0\x80", b"%",
    b"<",
)  # fmt: skip
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def mutated(rng: Random, inputs: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """A new input from one or two of the given ones, by one or a few changes."""
    data = _one_of(rng, inputs)
    num_changes = 1
    while num_changes < 8 and rng.random() < 0.45:
        num_changes += 1
    for _ in range(num_changes):
        data = _one_of(rng, CHANGES)(rng, data, inputs, words)
    return data[:MOST_BYTES]


def _one_of(rng, values):
    return values[int(rng.random() * len(values))]


def _span(rng: Random, data: bytes) -> tuple[int, int]:
    """Two places, mostly close to each other."""
    start = int(rng.random() * (len(data) + 1))
    longest = len(data) - start if rng.random() < 0.1 else min(len(data) - start, 12)
    return start, start + int(rng.random() * (longest + 1))


def _random_bytes(rng: Random, most: int) -> bytes:
    return rng.randbytes(1 + int(rng.random() * most))


def _flip(rng, data, inputs, words):
    if not data:
        return data
    place = int(rng.random() * len(data))
    return data[:place] + bytes([data[place] ^ (1 << int(rng.random() * 8))]) + data[place + 1 :]


def _set(rng, data, inputs, words):
    place = int(rng.random() * (len(data) + 1))
    return data[:place] + _random_bytes(rng, 2) + data[place + 1 :]


def _delete(rng, data, inputs, words):
    start, end = _span(rng, data)
    return data[:start] + data[end:]


def _truncate(rng, data, inputs, words):
    place = int(rng.random() * (len(data) + 1))
    return data[:place] if rng.random() < 0.8 else data[place:]


def _duplicate(rng, data, inputs, words):
    start, end = _span(rng, data)
    place = end if rng.random() < 0.5 else int(rng.random() * (len(data) + 1))
    return data[:place] + data[start:end] + data[place:]


def _repeat(rng, data, inputs, words):
    start, end = _span(rng, data)
    times = 2 ** int(1 + rng.random() * 6)
    return data[:end] + data[start:end] * times + data[end:]


def _move(rng, data, inputs, words):
    start, end = _span(rng, data)
    rest = data[:start] + data[end:]
    place = int(rng.random() * (len(rest) + 1))
    return rest[:place] + data[start:end] + rest[place:]


def _number(rng, data, inputs, words):
    """A number that is there becomes another one."""
    found = NUMBER.search(data, int(rng.random() * (len(data) + 1))) or NUMBER.search(data)
    if found is None:
        return _insert_word(rng, data, inputs, NUMBERS)
    new = _one_of(rng, NUMBERS) if rng.random() < 0.6 else _near(rng, found[0])
    return data[: found.start()] + new + data[found.end() :]


def _near(rng: Random, digits: bytes) -> bytes:
    number = int(digits[:30]) + _one_of(rng, (-1, 1, -2, 2, 10, 1000))
    return str(number).encode()


def _insert_word(rng, data, inputs, words):
    place = int(rng.random() * (len(data) + 1))
    return data[:place] + (_one_of(rng, words) if words else b"") + data[place:]


def _replace_by_word(rng, data, inputs, words):
    start, end = _span(rng, data)
    return data[:start] + (_one_of(rng, words) if words else b"") + data[end:]


def _separator(rng, data, inputs, words):
    start, end = _span(rng, data)
    return data[:start] + _one_of(rng, SEPARATORS) + data[start if rng.random() < 0.5 else end :]


def _line(rng, data, inputs, words):
    """A line goes, comes twice, changes its place or comes from another input."""
    lines = data.split(b"\n")
    place = int(rng.random() * len(lines))
    line = lines[place]
    kind = rng.random()
    if kind < 0.3:
        del lines[place]
    elif kind < 0.6:
        lines.insert(int(rng.random() * (len(lines) + 1)), line)
    elif kind < 0.8:
        lines[place] = _one_of(rng, _one_of(rng, inputs).split(b"\n"))
    else:
        other = int(rng.random() * len(lines))
        lines[place], lines[other] = lines[other], line
    return b"\n".join(lines)


def _length(rng, data, inputs, words):
    """A field of 1 to 8 bytes becomes an interesting number, of either order of bytes."""
    width = _one_of(rng, (1, 2, 4, 8))
    if len(data) < width:
        return data
    place = int(rng.random() * (len(data) - width + 1))
    if rng.random() < 0.5:
        place -= place % width
    number = _one_of(rng, LENGTHS) if rng.random() < 0.7 else -_one_of(rng, LENGTHS)
    order = "little" if rng.random() < 0.5 else "big"
    field = (number % 2 ** (8 * width)).to_bytes(width, order)
    return data[:place] + field + data[place + width :]


def _splice(rng, data, inputs, words):
    other = _one_of(rng, inputs)
    place, start = int(rng.random() * (len(data) + 1)), int(rng.random() * (len(other) + 1))
    return data[:place] + other[start:]


def _nest(rng, data, inputs, words):
    """What stands between two places is put into brackets, many times."""
    start, end = _span(rng, data)
    times = 2 ** int(rng.random() * 12)
    left, right = _one_of(rng, ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b"t"), (b'"', b'"')))
    return data[:start] + left * times + data[start:end] + right * times + data[end:]


CHANGES = (
    _flip, _set, _delete, _truncate, _duplicate, _repeat, _move, _number, _number, _insert_word,
    _replace_by_word, _separator, _separator, _line, _length, _splice, _nest,
)  # fmt: skip

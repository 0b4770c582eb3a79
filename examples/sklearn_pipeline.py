"""A pipeline of scikit-learn, from texts to labels, whose settings a search chooses.

python -m examples.sklearn_pipeline
"""

import random

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from evenhand.integrations.sklearn import Retriever
from examples.two_towers import NAMES, misspell


def main() -> float:  # share of new misspelt names whose label is first
    generator = random.Random(0)
    names = NAMES[::4]
    labels = [names[i % len(names)] for i in range(600)]
    texts = [misspell(label, generator) for label in labels]
    letters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 3))
    retriever = Retriever(num_steps=100, learning_rate=0.1, embedding_dim=32, random_state=0)
    search = GridSearchCV(
        make_pipeline(letters, retriever), {"retriever__tail_fraction": [0.25, 1.0]}, cv=2
    ).fit(texts[:400], labels[:400])
    accuracy = float(search.score(texts[400:], labels[400:]))
    print(f"{search.best_params_}, first label right: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()

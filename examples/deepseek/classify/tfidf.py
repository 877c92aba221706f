"""The baseline: TF-IDF and logistic regression, with the settings that are best on the validation split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

Labelled = Sequence[tuple[str, int]]
Predict = Callable[[Sequence[str]], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
# Settings to try: kinds of terms, and inverse regularization strengths.
TERMS: tuple[dict[str, Any], ...] = (
    {"analyzer": "word", "ngram_range": (1, 2)},
    {"analyzer": "char_wb", "ngram_range": (2, 5)},
)
STRENGTHS = (10, 100)


def fit_best(train: Labelled, validation: Labelled) -> Predict:
    """Return a function from texts to log-probabilities and the labels of their columns."""
    texts, labels = zip(*train, strict=True)
    others, wanted = zip(*validation, strict=True)
    found = []
    for terms in TERMS:
        vectors = TfidfVectorizer(sublinear_tf=True, **terms)
        known, unknown = vectors.fit_transform(texts), vectors.transform(others)
        for strength in STRENGTHS:
            with threadpool_limits(1):  # for sparse vectors, threads make the fit three times slower
                model = LogisticRegression(C=strength, max_iter=1000).fit(known, labels)
            found.append((float(model.score(unknown, wanted)), terms, vectors, model))
    accuracy, terms, vectors, model = max(found, key=lambda one: one[0])
    print(f"baseline: {terms}, C={model.C}: best of {len(found)} on validation, accuracy {accuracy:.4f}", flush=True)
    return lambda tested: (model.predict_log_proba(vectors.transform(tested)), model.classes_)

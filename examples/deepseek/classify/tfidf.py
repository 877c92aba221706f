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
    validation_texts, validation_labels = zip(*validation, strict=True)
    candidates = []
    for terms in TERMS:
        vectors = TfidfVectorizer(sublinear_tf=True, **terms)
        train_vectors, validation_vectors = vectors.fit_transform(texts), vectors.transform(validation_texts)
        for strength in STRENGTHS:
            with threadpool_limits(1):  # for sparse vectors, threads make the fit three times slower
                model = LogisticRegression(C=strength, max_iter=1000).fit(train_vectors, labels)
            candidates.append((float(model.score(validation_vectors, validation_labels)), terms, vectors, model))
    accuracy, terms, vectors, model = max(candidates, key=lambda candidate: candidate[0])
    print(
        f"baseline: {terms}, C={model.C}: best of {len(candidates)} on validation, accuracy {accuracy:.4f}", flush=True
    )
    return lambda test_texts: (model.predict_log_proba(vectors.transform(test_texts)), model.classes_)

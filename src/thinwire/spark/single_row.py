"""What a model offers without a DataFrame: predictions of one row, and the sizes of its inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from thinwire.errors import ConfigError
from thinwire.spark.params import SharedParams
from thinwire.spark.predict import Predictor


class SingleRow(SharedParams):
    """The methods of `TorchModel` for one row, as Spark's own classifiers and regressions have them."""

    parent: Any
    _example: Any
    _sizes: dict[str, int] | None

    def _predictor(self) -> Predictor:
        raise NotImplementedError

    @property
    def hasParent(self) -> bool:  # noqa: N802
        """Whether the estimator that fitted the model is known; False for a loaded model."""
        return self.parent is not None

    @property
    def numFeatures(self) -> int:  # noqa: N802
        """Numbers in a row of all input columns together; -1 if unknown, as in Spark ML."""
        return self._known_sizes().get("features", -1)

    @property
    def numClasses(self) -> int:  # noqa: N802
        """Number of classes of a classifier.

        Raises:
            ConfigError: The model is a regression, or was saved by a version that did not store the number.
        """
        found = self._known_sizes().get("outputs", -1)
        if self.getOrDefault(self.task) != "classification" or found < 1:
            why = "is a regression" if found > 0 else "does not know its outputs: it was saved without them"
            raise ConfigError(f"this TorchModel {why}, so that it has no numClasses; ask a classifier that was fitted")
        return max(found, 2)

    def predict(self, value: Any, *more: Any) -> Any:
        """The prediction for one row, without Spark: a class, a number, or an array where the network has several
        outputs.

        Args:
            value: value of the first input column: an ML vector, an array or a number.
            more: values of the further input columns.
        """
        found = self._predicted((value, *more))[-1]
        return found.item() if found.size == 1 else found

    def predictRaw(self, value: Any, *more: Any) -> Any:  # noqa: N802
        """The raw prediction of a classifier for one row, as an ML vector."""
        return self._vector_of(0, value, *more)

    def predictProbability(self, value: Any, *more: Any) -> Any:  # noqa: N802
        """The probabilities of the classes for one row, as an ML vector."""
        return self._vector_of(1, value, *more)

    def _vector_of(self, which: int, *values: Any) -> Any:
        from pyspark.ml.linalg import DenseVector

        found = self._predicted(values)
        if len(found) == 1:
            raise ConfigError(
                "this TorchModel is a regression, which has no raw prediction or probability; use predict"
            )
        return DenseVector(found[which])

    def _predicted(self, values: Sequence[Any]) -> list[Any]:
        names = self.getInputCols()
        if len(values) != len(names):
            raise ConfigError(f"{len(values)} values were given of a row; the columns are {names}: give one of each")
        return [array[0] for array in self._predictor().one(values)]

    def _known_sizes(self) -> dict[str, int]:
        """Numbers in a row of inputs and of outputs, as far as they are known."""
        if self._sizes is None:
            self._sizes = {}
            if self._example is not None and self._example.num_rows:
                predictor = self._predictor()
                with contextlib.suppress(Exception):  # errors of the user's transform, or of a row with a null
                    given = predictor.examples(self._example)
                    output = predictor([self._example.column(name) for name in predictor.inputs])[0]
                    features = sum(int(tensor[0].numel()) for tensor in given)
                    self._sizes = {"features": features, "outputs": int(output[0].size)}
        return self._sizes

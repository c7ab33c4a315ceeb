"""What Spark ML's own classifiers and regressions have, and what its own tests of estimators ask of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from torch import nn

from thinwire.errors import ConfigError
from thinwire.run.session import Result
from thinwire.spark import TorchEstimator, TorchModel


def fitted(
    module: nn.Module, example: dict[str, Any], task: str = "classification", transform: Any = None
) -> TorchModel:
    """A model as `fit` makes it, with one row of the data; no cluster is needed."""
    row = pa.RecordBatch.from_pylist([example])
    model = TorchModel._of(Result(module.eval(), [], {}), module, transform, row)
    return model.setParams(input_cols=list(example), task=task)


@pytest.fixture
def classifier() -> TorchModel:
    torch.manual_seed(0)
    return fitted(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), {"features": [0.5, 1.0, -1.0, 2.0]})


@pytest.mark.parametrize("made", [TorchEstimator, TorchModel])
def test_each_parameter_has_a_setter_and_a_getter_in_spark_s_spelling(made: Any) -> None:
    held = made()
    for param in held.params:
        name = f"{param.name[0].upper()}{param.name[1:]}"
        assert callable(getattr(held, f"set{name}")), param.name
        assert callable(getattr(held, f"get{name}")), param.name
        assert getattr(type(held), f"set{name}").__name__ == f"set{name}"
    assert held.setLabelCol("kind") is held
    assert held.setInputCols(["a"]).setPredictionCol("guess").getPredictionCol() == "guess"
    assert (held.getLabelCol(), held.getInputCols()) == ("kind", ["a"])
    assert len(held.explainParams().splitlines()) >= len(held.params)


def test_a_setter_takes_what_set_params_takes_and_refuses_what_it_refuses() -> None:
    net = (
        TorchEstimator().setModel("mlp").setEpochs(3).setLearningRate(0.5).setOptimizer("adam").setStrategy("sparknet")
    )
    assert (net.getEpochs(), net.getLearningRate(), net.getOptimizer(), net.getBatchSize()) == (3, 0.5, "adam", 64)
    with pytest.raises(ConfigError, match="epochs"):
        net.setEpochs("many")
    with pytest.raises(ConfigError, match="loss"):
        net.setLoss("cross_entropie")
    with pytest.raises(ConfigError, match="labelCol = None"):
        net.setLabelCol(None)
    assert net.getEpochs() == 3


def test_a_copy_with_other_parameters_leaves_the_original_as_it_was() -> None:
    """As pyspark.ml's own tests of Params ask."""
    net = TorchEstimator(model="mlp", input_cols=["x"], epochs=2)
    other = net.copy({net.epochs: 7, net.learningRate: 0.5})
    assert (net.getEpochs(), other.getEpochs(), other.getLearningRate()) == (2, 7, 0.5)
    assert other.uid == net.uid
    assert not net.isSet(net.learningRate)
    assert net.extractParamMap({net.epochs: 9})[net.epochs] == 9
    net.clear(net.epochs)
    assert net.getEpochs() == 1
    assert other.getEpochs() == 7


def test_one_row_is_predicted_without_spark(classifier: TorchModel) -> None:
    values = [0.5, 1.0, -1.0, 2.0]
    with torch.no_grad():
        raw = classifier.module(torch.tensor([values]))[0]
    for given in (
        values,
        np.array(values),
        Vectors.dense(values),
        Vectors.sparse(4, dict(enumerate(values))),
    ):
        assert classifier.predict(given) == float(raw.argmax())
        assert isinstance(classifier.predict(given), float)
        np.testing.assert_allclose(classifier.predictRaw(given).toArray(), raw.numpy(), rtol=1e-5)
        probability = classifier.predictProbability(given)
        assert isinstance(probability, DenseVector)
        np.testing.assert_allclose(probability.toArray(), torch.softmax(raw, 0).numpy(), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"2 values were given of a row; the columns are \['features'\]"):
        classifier.predict(values, 3)


def test_a_classifier_knows_its_classes_and_features(classifier: TorchModel) -> None:
    assert (classifier.numClasses, classifier.numFeatures) == (3, 4)
    one_logit = fitted(nn.Linear(4, 1), {"features": [0.0] * 4})
    assert one_logit.numClasses == 2
    assert one_logit.predictRaw([0.0] * 4).size == 2


def test_a_regression_gives_a_number_or_several_and_has_no_classes() -> None:
    one, two = (fitted(nn.Linear(2, outputs), {"x": [1.0, 2.0]}, "regression") for outputs in (1, 2))
    with torch.no_grad():
        assert one.predict([1.0, 2.0]) == pytest.approx(one.module(torch.tensor([1.0, 2.0])).item())
        np.testing.assert_allclose(two.predict([1.0, 2.0]), two.module(torch.tensor([1.0, 2.0])).numpy(), rtol=1e-5)
    assert one.numFeatures == two.numFeatures == 2
    for ask in (lambda: one.numClasses, lambda: one.predictRaw([1.0, 2.0]), lambda: one.predictProbability([1.0, 2.0])):
        with pytest.raises(ConfigError, match="is a regression"):
            ask()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kinds = nn.Linear(2, 3), nn.Embedding(5, 3)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.kinds(kind)


def test_a_row_of_several_columns_has_a_value_of_each_and_goes_through_the_transform() -> None:
    def halved(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"x": columns["x"] / 2}

    model = fitted(Two(), {"x": [1.0, 2.0], "kind": 3}, transform=halved)
    with torch.no_grad():
        expected = model.module(torch.tensor([[0.5, 1.0]]), torch.tensor([3]))[0]
    np.testing.assert_allclose(model.predictRaw([1.0, 2.0], 3).toArray(), expected.numpy(), rtol=1e-5)
    np.testing.assert_allclose(
        model.predictRaw(SparseVector(2, [0, 1], [1.0, 2.0]), 3).toArray(), expected.numpy(), rtol=1e-5
    )
    assert (model.numFeatures, model.numClasses) == (3, 3)


def test_what_is_not_known_of_a_model_is_said_as_spark_says_it() -> None:
    model = TorchModel._of(Result(nn.Linear(2, 2), [], {}), nn.Linear(2, 2), None).setParams(input_cols=["x"])
    model.setTask("classification")
    assert model.numFeatures == -1
    assert not model.hasParent
    with pytest.raises(ConfigError, match="does not know its outputs"):
        _ = model.numClasses


def test_the_transform_of_a_fit_that_reads_other_columns_stops_neither_sizes_nor_saving() -> None:
    def labelled(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"label": columns["name"]}

    model = fitted(nn.Linear(2, 2), {"x": [1.0, 2.0]}, transform=labelled)
    assert model.numFeatures == -1
    program, why = model._program()
    assert program == b""
    assert "name" in why

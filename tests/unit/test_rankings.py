"""AUC, average precision and F1 are those of all rows of all workers, as scikit-learn has them; quantile losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, mean_pinball_loss, roc_auc_score
from torch import nn

import thinwire as tw
from thinwire.coordinator.stopping import smaller_is_better
from thinwire.errors import ConfigError
from thinwire.replicas.metrics import computed, condense, measure
from thinwire.replicas.objectives import METRICS, metrics_of
from thinwire.replicas.rankings import MOST_SCORES

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(1500, 4)).astype(np.float32)
LABEL = ((X[:, 0] + RANDOM.normal(size=1500)) > 1.5).astype(np.int64)
W = RANDOM.uniform(0.1, 3.0, 1500).astype(np.float32)
NAMES = ("auc", "average_precision", "f1")


def run(workers: int = 3, outputs: int = 1, **more: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "validation": {"x": X[500:], "label": LABEL[500:], "w": W[500:]},
        "inputs": ["x"],
        "loss": "bce_with_logits" if outputs == 1 else "cross_entropy",
        "metrics": NAMES,
        "epochs": 2,
        "batch_size": 16,
        "optimizer": {"name": "adam", "lr": 0.05},
        "cluster": tw.Simulated(workers=workers, step_s=0.01),
        "progress": False,
    }
    data = {"x": X[:500], "label": LABEL[:500], "w": W[:500]}
    return tw.fit(lambda: nn.Linear(4, outputs), data, **(settings | more))


def of_all_rows(model: nn.Module, weight: Any = None) -> dict[str, float]:
    with torch.no_grad():
        output = model(torch.from_numpy(X[500:])).numpy()
    score = output[:, 0] if output.shape[1] == 1 else output[:, 1] - output[:, 0]
    label = LABEL[500:]
    return {
        "auc": roc_auc_score(label, score, sample_weight=weight),
        "average_precision": average_precision_score(label, score, sample_weight=weight),
        "f1": f1_score(label, score > 0, sample_weight=weight),
    }


@pytest.mark.parametrize("weight", [None, "w"])
@pytest.mark.parametrize(("workers", "outputs"), [(1, 1), (3, 1), (3, 2)])
def test_rankings_are_those_of_all_rows_of_all_workers(workers: int, outputs: int, weight: str | None) -> None:
    result = run(workers, outputs, weight=weight)
    expected = of_all_rows(result.model, None if weight is None else W[500:])
    for name in NAMES:
        assert result.summary[f"val_{name}"] == pytest.approx(expected[name], abs=1e-6), name
    assert 0.6 < result.summary["val_auc"] < 0.95


def test_groups_of_workers_have_the_same_rankings() -> None:
    result = run(4, placement=tw.Planned(group_size=2))
    assert result.summary["val_auc"] == pytest.approx(of_all_rows(result.model)["auc"], abs=1e-6)


def merged(name: str, parts: list[tuple[Any, Any]], batch: int = 1000) -> tuple[float, list[int]]:
    """A metric over workers' rows, by batches, and how many numbers each worker reports."""
    metrics, totals, sizes = {name: METRICS[name]}, dict[str, float](), []
    for score, label in parts:
        sums: dict[str, float] = {}
        for start in range(0, len(score), batch):
            rows = slice(start, start + batch)
            output, truth = torch.from_numpy(score[rows]), torch.from_numpy(label[rows])
            for key, (total, _) in measure(name, metrics[name], output, truth, None, len(truth)).items():
                sums[f"val_{key}"] = sums.get(f"val_{key}", 0.0) + total
            condense(metrics, sums, whole=False)
        condense(metrics, sums, whole=True)
        sizes.append(len(sums))
        for key, total in sums.items():
            totals[key] = totals.get(key, 0.0) + total
    return computed({f"val_{name}": metrics[name]}, totals)[f"val_{name}"], sizes


@pytest.mark.parametrize("scale", [1.0, 1e-3, 50.0], ids=["logits", "small", "large"])
@pytest.mark.parametrize("name", ["auc", "average_precision"])
def test_of_more_scores_than_a_worker_reports_last_bits_are_dropped(name: str, scale: float) -> None:
    """Of workers with 60,000 and 3,000 rows: one drops bits, and the other's scores are taken as coarsely."""
    label = (RANDOM.random(63_000) < 0.05).astype(np.int64)
    score = ((RANDOM.normal(size=63_000) + 1.3 * label - 3) * scale).astype(np.float32)
    expected = {"auc": roc_auc_score, "average_precision": average_precision_score}[name](label, score)
    found, sizes = merged(name, [(score[:60_000], label[:60_000]), (score[60_000:], label[60_000:])])
    assert found == pytest.approx(expected, abs=2e-4)
    assert max(sizes) <= MOST_SCORES
    exactly, _ = merged(name, [(score[:3000], label[:3000]), (score[3000:6000], label[3000:6000])])
    reference = {"auc": roc_auc_score, "average_precision": average_precision_score}[name]
    assert exactly == pytest.approx(reference(label[:6000], score[:6000]), abs=1e-12)


def test_ties_count_as_a_half_and_minus_zero_is_zero() -> None:
    score, label = np.array([-0.0, 0.0, 1.0, -2.0], np.float32), np.array([1, 0, 0, 0])
    assert merged("auc", [(score, label)])[0] == pytest.approx(roc_auc_score(label, score)) == 0.5


@pytest.mark.parametrize(
    ("score", "label"),
    [([1.0, 2.0], [0, 0]), ([1.0, 2.0], [1, 1]), ([1.0, np.nan, 3.0], [0, 1, 1]), ([1.0, -np.nan, 3.0], [0, 1, 1])],
    ids=["no positive", "no negative", "NaN", "minus NaN"],
)
def test_what_is_not_defined_is_nan(score: Any, label: Any) -> None:
    assert np.isnan(merged("auc", [(np.array(score, np.float32), np.array(label))])[0])


def test_infinite_scores_have_their_place() -> None:
    score, label = np.array([-np.inf, 0.0, np.inf, 5.0], np.float32), np.array([0, 1, 1, 0])
    assert merged("auc", [(score, label)])[0] == 0.75


def test_f1_of_more_classes_is_the_mean_over_classes() -> None:
    output, label = torch.from_numpy(RANDOM.normal(size=(300, 4))), torch.from_numpy(RANDOM.integers(0, 4, 300))
    sums = {key: value for key, (value, _) in measure("f1", METRICS["f1"], output, label, None, 300).items()}
    assert computed({"f1": METRICS["f1"]}, sums)["f1"] == pytest.approx(
        f1_score(label, output.argmax(1), average="macro")
    )


def test_rows_whose_label_counts_for_nothing_are_left_out() -> None:
    score, label = np.array([1.0, 2.0, 3.0, 9.0], np.float32), np.array([0, 1, 1, -100])
    assert merged("auc", [(score, label)])[0] == 1.0


def test_auc_of_more_classes_is_refused_before_a_worker_starts() -> None:
    log: list[Any] = []
    with pytest.raises(ConfigError, match=r"'auc' is of two classes, and the model has 3 outputs.*'f1'"):
        run(2, 3, metrics=["auc"], callbacks=[log.append])
    assert not log


def test_a_ranking_ends_a_run_and_chooses_the_best_with_larger_as_better() -> None:
    result = run(2, until="val_auc >= 0.6", epochs=50)
    assert "target reached: val_auc" in result.summary["reason"]
    stopped = run(2, stop=tw.EarlyStopping(metric="val_auc", patience=2), epochs=12, evaluate_every=4)
    best = max(stopped.history, key=lambda row: row["val_auc"])
    assert stopped.summary["best_evaluation"] == best["number"]
    assert stopped.summary["model"] == "best"
    for target in ("val_auc >= 90", "val_f1 >= 1.1", "val_average_precision >= 2"):
        with pytest.raises(ConfigError, match=r"cannot be reached: val_.* is a share from 0 to 1"):
            run(2, until=target)


@pytest.mark.parametrize(
    "name", ["val_quantile_90", "val_mae", "val_loss", "val_my_loss", "val_mean_error", "train_loss"]
)
def test_losses_and_errors_fall_as_training_succeeds(name: str) -> None:
    assert smaller_is_better(name)


@pytest.mark.parametrize("name", ["val_auc", "val_average_precision", "val_f1", "val_accuracy", "val_recall"])
def test_shares_rise_as_training_succeeds(name: str) -> None:
    assert not smaller_is_better(name)


def test_names_and_functions_go_together() -> None:
    found = metrics_of({"ranking": "auc", "own": lambda output, label: output})
    assert found["ranking"] is METRICS["auc"]
    with pytest.raises(ConfigError, match=r"metric 'acu' is not known.*'auc'"):
        metrics_of({"ranking": "acu"})


# -- quantiles --------------------------------------------------------------------------------------------------------

Y = (3 * X[:, 0] + RANDOM.exponential(2.0, 1500)).astype(np.float32)


def test_a_quantile_is_learnt_and_measured_by_name() -> None:
    result = tw.fit(
        lambda: nn.Linear(4, 1),
        {"x": X[:500], "label": Y[:500]},
        validation={"x": X[500:], "label": Y[500:]},
        loss="quantile_90",
        metrics=["quantile_90"],
        epochs=40,
        optimizer={"name": "adam", "lr": 0.1},
        cluster=tw.Simulated(workers=2, step_s=0.01),
        progress=False,
    )
    with torch.no_grad():
        output = result.model(torch.from_numpy(X[500:])).numpy()[:, 0]
    assert 0.85 < (Y[500:] <= output).mean() < 0.95
    expected = mean_pinball_loss(Y[500:], output, alpha=0.9)
    assert result.summary["val_quantile_90"] == pytest.approx(expected, rel=1e-5)
    assert result.summary["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_several_quantiles_have_an_output_each() -> None:
    loss = tw.QuantileLoss(0.1, 0.9)
    output, label = torch.from_numpy(X[:, :2].copy()), torch.from_numpy(Y)
    expected = [mean_pinball_loss(Y, X[:, i], alpha=q) for i, q in enumerate((0.1, 0.9))]
    assert float(loss(output, label).mean()) == pytest.approx(np.mean(expected), rel=1e-5)
    result = tw.fit(
        lambda: nn.Linear(4, 2),
        {"x": X, "label": Y.astype(np.float64), "w": W},
        inputs=["x"],
        weight="w",
        loss=loss,
        metrics={"pinball": loss},
        validation=0.2,
        cluster=tw.Simulated(workers=2, step_s=0.01),
        progress=False,
    )
    assert result.summary["val_pinball"] == pytest.approx(result.summary["val_loss"])


@pytest.mark.parametrize("quantiles", [(), (0.0,), (1.0,), (1.5,), (True,), ("0.5",), (float("nan"),)])
def test_what_is_no_quantile_is_refused(quantiles: Any) -> None:
    with pytest.raises(ConfigError, match="quantile"):
        tw.QuantileLoss(*quantiles)


def test_outputs_that_are_not_one_a_quantile_are_refused_before_a_worker_starts() -> None:
    with pytest.raises(ConfigError, match="QuantileLoss of 2 quantiles is given outputs in the shape"):
        tw.fit(
            lambda: nn.Linear(4, 3),
            {"x": X, "label": Y},
            loss=tw.QuantileLoss(0.1, 0.9),
            cluster=tw.Simulated(workers=2, step_s=0.01),
            progress=False,
        )

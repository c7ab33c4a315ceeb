"""The parameter table as an interface: what users call, and consistency models that are made by overriding handlers."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import ConfigError, TimedOutError
from thinwire.strategies import Eventual, Strict, TableTuple


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def table(consistency: Any, workers: int = 2, **knobs: Any) -> tw.Table:
    strategy = tw.ParameterTable(consistency=consistency, optimizer=sgd, **knobs)
    return tw.Table(network(), workers=workers, strategy=strategy)


def rows(worker: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(worker)
    return torch.randn(8, 6, generator=made), torch.randint(0, 3, (8,), generator=made)


LAYERS = network()


def gradients(values: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    held = {name: value.requires_grad_() for name, value in values.items()}
    loss = nn.functional.cross_entropy(torch.func.functional_call(copy.deepcopy(LAYERS), held, (x,)), y)
    return dict(zip(held, torch.autograd.grad(loss, list(held.values())), strict=True))


def read(found: tw.Table, worker: int = 0) -> dict[str, Tensor]:
    delegate = found.delegate(worker)
    for name in found.names:
        delegate.get(name)
    return {name: delegate.collect(name, 0.0) for name in found.names}


def alone(steps: int, workers: int) -> dict[str, Tensor]:
    module = network()
    stepping = sgd(module.parameters())
    parts = [rows(worker) for worker in range(workers)]
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    for _ in range(steps):
        stepping.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        stepping.step()
    return dict(module.state_dict())


class OwnStrict(tw.TableHandlers):
    """Strict consistency, written anew: all workers' updates as one (Algorithm 3, line 11)."""

    strict = True

    def handle_update(self, tuple: TableTuple) -> None:
        if tuple.wanted and all(set(tuple.heard[group]) == set(tuple.wanted[group]) for group in tuple.wanted):
            tuple.update(list(tuple.wanted))


@pytest.mark.parametrize("consistency", ["strict", Strict(), OwnStrict()], ids=["word", "class", "own"])
def test_threads_under_strict_consistency_are_one_worker_with_all_rows(consistency: Any) -> None:
    found = table(consistency, workers=3)

    def train(worker: int) -> None:
        delegate = found.delegate(worker)
        for _ in range(4):
            delegate.step(lambda values: gradients(values, *rows(worker)))

    threads = [threading.Thread(target=train, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, value in alone(4, 3).items():
        torch.testing.assert_close(read(found)[name], value, atol=1e-6, rtol=0)


def test_under_strict_consistency_a_read_waits_for_all_updates_and_under_eventual_for_none() -> None:
    for consistency, waits in (("strict", True), ("eventual", False)):
        found = table(consistency)
        one, other = found.delegate(0), found.delegate(1)
        before = read(found)["0.bias"]
        one.update("0.bias", torch.ones(5))
        one.get("0.bias")
        if waits:
            with pytest.raises(TimedOutError, match=r"worker 0 waited 0 s for '0.bias'.*leave\(\)"):
                one.collect("0.bias", 0.0)
            other.update("0.bias", torch.ones(5))
        assert torch.equal(one.collect("0.bias", 0.0), before - 0.1)


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    found = table("strict")
    before = read(found)["0.bias"]
    one = found.delegate(0)
    one.update("0.bias", torch.ones(5))
    found.leave(1)
    one.get("0.bias")
    assert torch.equal(one.collect("0.bias", 0.0), before - 0.1)


class Half(tw.TableHandlers):
    """An update is applied once half of the workers have sent theirs; handlers put, collect and checkpoint as well."""

    def handle_put(self, tuple: TableTuple, value: Tensor) -> None:
        tuple.put(value.clamp(-1, 1))

    def handle_update(self, tuple: TableTuple) -> None:
        heard = sum(len(workers) for workers in tuple.heard.values())
        if 2 * heard >= sum(len(workers) for workers in tuple.wanted.values()):
            mean = tuple.collect(list(tuple.heard))
            tuple.update(list(tuple.heard))
            if mean is not None and mean.abs().max() > 100:
                tuple.checkpoint()

    def checkpoint_now(self, tuple: TableTuple, every: int) -> bool:
        return False


def test_handlers_of_ones_own_decide_when_updates_count_and_what_is_kept() -> None:
    found = table(Half(), workers=4)
    delegates = [found.delegate(worker) for worker in range(4)]
    delegates[0].put("0.bias", torch.full((5,), 7.0))
    assert torch.equal(read(found)["0.bias"], torch.ones(5))
    delegates[0].update("0.bias", torch.full((5,), 2.0))
    assert torch.equal(read(found, 1)["0.bias"], torch.ones(5))
    delegates[1].update("0.bias", torch.full((5,), 4.0))
    assert torch.allclose(read(found)["0.bias"], torch.full((5,), 0.7))


def test_handlers_keep_what_they_call_checkpoint_for() -> None:
    found = table(Half(), workers=1)
    one = found.delegate(0)

    def update(size: float) -> None:
        for name, value in read(found).items():
            one.update(name, torch.full_like(value, size))

    update(1.0)
    with pytest.raises(ConfigError, match=r"no checkpoint of all parameters.*call checkpoint\(\)"):
        found.restore()
    update(1000.0)
    kept = read(found)
    update(1.0)
    assert found.restore() == 2
    assert all(torch.equal(read(found)[name], kept[name]) for name in kept)


def test_a_checkpoint_is_gone_back_to_with_the_optimizer_s_state() -> None:
    found = table("eventual", workers=1)
    delegate = found.delegate(0)

    def step() -> None:
        delegate.step(lambda values: gradients(values, *rows(0)))

    step()
    delegate.checkpoint()
    kept = read(found)
    step()
    after = read(found)
    step()
    assert found.restore() == 1
    assert all(torch.equal(read(found)[name], kept[name]) for name in kept)
    step()
    assert all(torch.equal(read(found)[name], after[name]) for name in after)


def test_a_checkpoint_of_all_parameters_holds_whatever_their_versions() -> None:
    found = table("eventual", workers=1)
    one = found.delegate(0)
    one.update("0.bias", torch.ones(5))
    one.checkpoint()
    kept = read(found)
    one.update("0.bias", torch.ones(5))
    one.update("2.bias", torch.ones(3))
    assert found.restore() == 0
    assert all(torch.equal(read(found)[name], kept[name]) for name in kept)


def test_a_bound_on_staleness_is_a_handler_too() -> None:
    found = table(Eventual(staleness=1))
    one = found.delegate(0)
    for _ in range(2):
        one.update("0.bias", torch.ones(5))
        one.get("0.bias")
    with pytest.raises(TimedOutError):
        one.collect("0.bias", 0.0)
    found.delegate(1).update("0.bias", None)
    assert one.collect("0.bias", 0.0).shape == (5,)


def test_wrong_calls_of_a_table_are_refused_in_words() -> None:
    found = table("strict")
    one = found.delegate(0)
    with pytest.raises(ConfigError, match=r"'0.bia' is no trainable parameter.*0.bias"):
        one.get("0.bia")
    with pytest.raises(ConfigError, match=r"was not asked for by worker 0; call get"):
        one.collect("0.bias")
    with pytest.raises(ConfigError, match=r"shape \(4,\), which is not the parameter's"):
        one.update("0.bias", torch.ones(4))
    one.update("0.bias", torch.ones(5))
    with pytest.raises(ConfigError, match=r"its last one waits for other workers; call get and collect"):
        one.update("0.bias", torch.ones(5))
    with pytest.raises(ConfigError, match=r"consistency = 'lax' is not known; use 'strict', 'eventual', or an object"):
        tw.ParameterTable(consistency="lax")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"staleness = 3 has no effect beside handlers of your own"):
        tw.ParameterTable(consistency=OwnStrict(), staleness=3)
    with pytest.raises(ConfigError, match="worker 2 is not of this table"):
        found.delegate(2)


@pytest.mark.parametrize("own", [True, False])
def test_handlers_of_ones_own_serve_a_run(own: bool) -> None:
    """In virtual time: strict consistency made by overriding trains to the parameters of the built-in one."""
    given: dict[str, Any] = {"inputs": ["pixels"], "steps": 6, "progress": False}
    given["cluster"] = tw.Simulated(workers=3, step_s=0.01, slow={1: 2.0})
    consistency: Any = OwnStrict() if own else Eventual()
    one = tw.fit("cnn8", "digits", strategy=tw.ParameterTable(consistency=consistency), **given)
    other = tw.fit("cnn8", "digits", strategy=tw.ParameterTable(consistency="strict"), **given)
    pairs = list(zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs) == own


def test_attached_modules_of_several_threads_are_one_worker_with_all_rows() -> None:
    found = table("strict", workers=3)

    def train(worker: int) -> None:
        module = network()
        found.delegate(worker).attach(module)
        x, y = rows(worker)
        for _ in range(4):
            nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]

    threads = [threading.Thread(target=train, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, value in alone(4, 3).items():
        torch.testing.assert_close(read(found)[name], value, atol=1e-6, rtol=0)


def test_a_layer_waits_for_its_own_parameters_only_right_before_its_forward_pass() -> None:
    """While the last layer's update of another worker is missing, the first layer has computed already."""
    found = table("strict")
    module, other = network(), found.delegate(1)
    found.delegate(0).attach(module)
    x, y = rows(0)
    nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    first, last = threading.Event(), threading.Event()
    module[0].register_forward_hook(lambda *_: first.set())
    module[2].register_forward_hook(lambda *_: last.set())
    for name in ("0.weight", "0.bias"):
        other.update(name, None)
    computing = threading.Thread(target=module, args=(x,))
    computing.start()
    assert first.wait(60)
    assert not last.is_set()
    for name in ("2.weight", "2.bias"):
        other.update(name, None)
    computing.join()
    assert last.is_set()


def test_a_module_of_other_parameters_cannot_be_attached() -> None:
    with pytest.raises(ConfigError, match=r"Linear has not the table's parameters: '0.bias' is in one of them only"):
        table("strict").delegate(0).attach(nn.Linear(6, 5))

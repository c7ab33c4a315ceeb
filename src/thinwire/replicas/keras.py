"""A Keras 3 model as a torch module: TensorFlow, JAX or torch computes, and everything else is as with torch.

The model's trainable weights are torch parameters here. A forward pass hands them to the backend, a backward pass
brings its gradients back, so that optimizers, strategies, checkpoints and clusters need to know nothing of it.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError

Weights = list[Any]


def is_keras(model: object) -> bool:
    """Whether this is a Keras model, on whatever backend."""
    return hasattr(model, "stateless_call") and hasattr(model, "trainable_variables")


class KerasModule(nn.Module):
    """A built Keras model, called with tensors and trained as any module.

    Args:
        model: the Keras model; it must be built: give its input shape, or call it once.
    """

    only_whole: ClassVar[str] = "Keras computes it as a whole"

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not getattr(model, "built", False):
            raise ConfigError("the Keras model has no weights yet; give it an Input of a shape, or call it once")
        self._take(model)
        self.weights = nn.ParameterList(nn.Parameter(_tensor(_array(v))) for v in model.trainable_variables)
        for index, variable in enumerate(model.non_trainable_variables):
            self.register_buffer(f"state_{index}", _tensor(_array(variable)))

    def _take(self, model: Any) -> None:
        """Keeps a model, and makes what computes with it."""
        self._model = [model]  # in a list, so that nn.Module does not look into it
        self._backend = _backend_of(model)
        engines: dict[str, Callable[[Any], _Engine | None]] = {
            "jax": _Jax,
            "tensorflow": _TensorFlow,
            "torch": lambda model: None,
        }
        if self._backend not in engines:
            raise ConfigError(f"Keras runs on {self._backend!r}; 'tensorflow', 'jax' and 'torch' are supported")
        self._engine = engines[self._backend](model)
        self._dtypes = [np.dtype(str(v.dtype)) for v in model.non_trainable_variables]

    @property
    def keras(self) -> Any:
        """The Keras model, with the weights as they are here."""
        model = self._model[0]
        for variable, weight in zip(model.trainable_variables, self.weights, strict=True):
            variable.assign(weight.detach().cpu().numpy())
        for variable, value in zip(model.non_trainable_variables, self._states(), strict=True):
            variable.assign(value)
        return model

    def _states(self) -> list[Any]:
        held = [getattr(self, f"state_{index}") for index in range(len(self._dtypes))]
        return [value.detach().cpu().numpy().astype(kind) for value, kind in zip(held, self._dtypes, strict=True)]

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor
        if self._engine is None:
            states = [torch.from_numpy(state).to(self.weights[0].device) for state in self._states()]
            found, after = self._model[0].stateless_call(list(self.weights), states, *inputs, training=self.training)
            if self.training:
                self.remember([_array(value) for value in after])
            return found
        found = _Call.apply(self, len(inputs), *inputs, *self.weights)  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def remember(self, states: Sequence[Any]) -> None:
        """Takes over what a training pass left in weights that are not trained: moving means, seeds."""
        for index, value in enumerate(states):
            getattr(self, f"state_{index}").copy_(_tensor(np.asarray(value)))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_model", "_engine", "_dtypes"):
            state.pop(name)
        return state | {"_described": self._model[0].to_json()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        described, backend = state.pop("_described"), state["_backend"]
        os.environ.setdefault("KERAS_BACKEND", backend)
        import keras

        if keras.backend.backend() != backend:
            raise ConfigError(
                f"the model was made with Keras on {backend!r}, and this process has it on "
                f"{keras.backend.backend()!r}; set KERAS_BACKEND={backend} there"
            )
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._take(keras.models.model_from_json(described))


class _Engine(ABC):
    """Computes a model's output and its vector-Jacobian product."""

    @abstractmethod
    def run(self, weights: Weights, states: Weights, inputs: Weights, training: bool) -> tuple[Any, Weights, Any]:
        """Output, the states afterwards, and what `back` needs."""

    @abstractmethod
    def back(self, kept: Any, gradient: Any) -> tuple[Weights, Weights]:
        """Gradients of weights and of inputs."""


class _Jax(_Engine):
    def __init__(self, model: Any) -> None:
        import jax

        def both(weights: Weights, states: Weights, inputs: Weights, training: bool) -> Any:
            def call(weights: Weights, inputs: Weights) -> Any:
                return model.stateless_call(weights, states, *inputs, training=training)

            return jax.vjp(call, weights, inputs, has_aux=True)

        self._both = jax.jit(both, static_argnums=3)
        self._back = jax.jit(lambda kept, gradient: kept(gradient))

    def run(self, weights: Weights, states: Weights, inputs: Weights, training: bool) -> tuple[Any, Weights, Any]:
        output, kept, after = self._both(weights, states, inputs, training)
        return np.asarray(output), after, kept

    def back(self, kept: Any, gradient: Any) -> tuple[Weights, Weights]:
        of_weights, of_inputs = self._back(kept, gradient)
        return [np.asarray(g) for g in of_weights], [np.asarray(g) for g in of_inputs]


class _TensorFlow(_Engine):
    def __init__(self, model: Any) -> None:
        import tensorflow

        self._tf = tensorflow

        def call(weights: Weights, states: Weights, inputs: Weights, training: bool) -> Any:
            return model.stateless_call(weights, states, *inputs, training=training)

        self._call = tensorflow.function(call)

    def run(self, weights: Weights, states: Weights, inputs: Weights, training: bool) -> tuple[Any, Weights, Any]:
        tf = self._tf
        held, given = [tf.constant(w) for w in weights], [tf.constant(x) for x in inputs]
        with tf.GradientTape(persistent=False) as tape:
            watched = [*held, *(x for x in given if x.dtype.is_floating)]
            tape.watch(watched)
            output, after = self._call(held, [tf.constant(s) for s in states], given, training)
        return output.numpy(), [value.numpy() for value in after], (tape, output, held, given)

    def back(self, kept: Any, gradient: Any) -> tuple[Weights, Weights]:
        tape, output, held, given = kept
        floating = [x for x in given if x.dtype.is_floating]
        found = tape.gradient(
            output, [*held, *floating], output_gradients=self._tf.constant(gradient), unconnected_gradients="zero"
        )
        values = [np.asarray(self._tf.convert_to_tensor(g)) for g in found]
        of_inputs = iter(values[len(held) :])
        return values[: len(held)], [next(of_inputs) if x.dtype.is_floating else None for x in given]


class _Call(torch.autograd.Function):
    """One pass through the backend, and back."""

    @staticmethod
    def forward(ctx: Any, module: KerasModule, count: int, *tensors: Tensor) -> Tensor:
        inputs, weights = tensors[:count], tensors[count:]
        assert module._engine is not None
        output, after, kept = module._engine.run(
            [w.detach().cpu().numpy() for w in weights],
            module._states(),
            [x.detach().cpu().numpy() for x in inputs],
            module.training,
        )
        if module.training:
            module.remember(after)
        ctx.module, ctx.count, ctx.kept, ctx.device = module, count, kept, weights[0].device
        return _tensor(output).to(weights[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        of_weights, of_inputs = ctx.module._engine.back(ctx.kept, gradients[0].contiguous().cpu().numpy())
        inputs = [
            _tensor(g).to(ctx.device) if needed and g is not None and g.dtype.kind == "f" else None
            for g, needed in zip(of_inputs, ctx.needs_input_grad[2 : 2 + ctx.count], strict=True)
        ]
        return (None, None, *inputs, *(_tensor(g).to(ctx.device) for g in of_weights))


def _array(value: Any) -> Any:
    """The numbers of a variable or tensor of any backend."""
    import keras

    return keras.ops.convert_to_numpy(value)


def _tensor(value: Any) -> Tensor:
    array = np.array(value)
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "u" else array)


def _backend_of(model: Any) -> str:
    keras = sys.modules.get("keras")
    return "unknown" if keras is None else str(keras.backend.backend())

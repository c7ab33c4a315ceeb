"""`thinwire caffe`: shows and converts Caffe's files; and arguments of recipes that name such files."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire import caffe
from thinwire.caffe.export import fill_from_safetensors, save_safetensors
from thinwire.caffe.layers import Shape
from thinwire.caffe.prototxt import parse, read_text
from thinwire.caffe.solver import Settings
from thinwire.caffe.sources import DatumSource
from thinwire.caffe.training import Fed, Training, input_names, training, whole_loss
from thinwire.cli.first_rows import first_rows
from thinwire.errors import ConfigError
from thinwire.recipe import Recipe
from thinwire.run.arguments import checked


def act(options: argparse.Namespace) -> int:
    """Runs `caffe show` or `caffe convert`; returns the exit code."""
    return show(options) if options.act == "show" else convert(options)


def show(options: argparse.Namespace) -> int:
    """Prints a network layer by layer, a solver's settings, or the blobs of a caffemodel."""
    if options.file.endswith(".caffemodel"):
        _show_weights(options.file)
    elif (text := read_text(options.file)) and _is_solver(text):
        _show_solver(Settings.of(parse("SolverParameter", text, options.file), options.file))
    else:
        _show_net(options)
    return 0


def _is_solver(text: str) -> bool:
    return re.search(r"^\s*(base_lr|max_iter|lr_policy)\s*:", text, re.MULTILINE) is not None


def _show_solver(settings: Settings) -> None:
    table = Table(show_header=False)
    for name, value in vars(settings).items():
        table.add_row(name, str(value))
    Console().print(table)


def _show_weights(path: str) -> None:
    table = Table("layer", "blobs", "numbers", title=os.path.basename(path))
    blobs = caffe.read_weights(path)
    for name, held in blobs.items():
        shapes = ", ".join("×".join(map(str, blob.shape)) or "1" for blob in held)
        table.add_row(name, shapes, f"{sum(blob.values.size for blob in held):,}")
    table.add_row("", "", f"{sum(blob.values.size for held in blobs.values() for blob in held):,}")
    Console().print(table)


def _show_net(options: argparse.Namespace) -> None:
    net = _net(options)
    found = net.prepare(_shapes(options, net))
    table = Table("layer", "type", "from", "to", "shape", "parameters", title=net.name or options.file)
    counted: set[int] = set()
    for node in net.nodes:
        made = net.layer_of(node)
        blobs = [getattr(made, name) for name in made.kept] if made.is_ready else []
        number = sum(blob.numel() for blob in blobs if id(blob) not in counted)
        counted.update(id(blob) for blob in blobs)
        shapes = ", ".join("×".join(map(str, found[top])) for top in node.tops if top in found)
        table.add_row(
            node.name, node.type, ", ".join(node.bottoms), ", ".join(node.tops), shapes, f"{number:,}" if number else ""
        )
    total = sum(p.numel() for p in net.parameters())
    table.add_row("", "", "", "", "", f"{total:,}")
    Console().print(table)
    if not net.is_ready:
        Console().print(f"shapes are not known: give --input 3x32x32 for {net.inputs[0]!r}, or --weights")


def convert(options: argparse.Namespace) -> int:
    """Writes a network's weights in the format that the extension of --out names."""
    net = _net(options)
    net.prepare(_shapes(options, net))
    if options.weights is None:
        raise ConfigError("--weights is missing; name the caffemodel or safetensors file to convert")
    if options.weights.endswith(".safetensors"):
        fill_from_safetensors(net, options.weights)
    else:
        caffe.fill(net, options.weights)
    if options.out.endswith(".safetensors"):
        save_safetensors(net, options.out)
    elif options.out.endswith(".caffemodel"):
        caffe.save(net, options.out)
    else:
        raise ConfigError(f"--out {options.out!r} ends in neither .safetensors nor .caffemodel; name one of them")
    count = sum(p.numel() for p in net.parameters())
    Console().print(f"{count:,} parameters of {len(net.params)} layers are in {options.out}")
    return 0


def _net(options: argparse.Namespace) -> caffe.CaffeNet:
    return caffe.CaffeNet(caffe.read_net(options.file), options.phase)


def _shapes(options: argparse.Namespace, net: caffe.CaffeNet) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs from --input, for a batch of one; further inputs are labels of one number each."""
    if options.input is None:
        return {}
    if not re.fullmatch(r"\d+(x\d+)*", options.input):
        raise ConfigError(f"--input {options.input!r} is not a shape; write it as 3x32x32")
    first, *others = net.inputs
    return {first: (1, *(int(part) for part in options.input.split("x"))), **dict.fromkeys(others, (1,))}


# -- recipes ------------------------------------------------------------------------------------------------------


def arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of `fit` from a recipe's Caffe files; the recipe's own keys override them."""
    train, data, model = recipe.train, recipe.data, recipe.model
    if model.zoo is not None or model.factory is not None:
        raise ConfigError(
            "[model] names both a Caffe network (or a solver that names one) and another network; name one"
        )
    if train.solver is not None and train.scheduler is not None:
        raise ConfigError("train.solver has its own learning rates; leave train.scheduler out")
    source: Any = _opened(data.source)
    shapes = {} if data.source is None else _row_shapes(recipe, source)
    found = training(model.caffe, train.solver, weights=model.weights, shapes=shapes)
    rows = source if data.source is not None else found.source
    if rows is None:
        raise ConfigError("the network's data layer names no LMDB folder that is here; name rows in data.source")
    validation = data.validation if data.validation is not None or data.source is not None else found.validation
    given = {
        "model": found.model,
        "data": rows,
        "inputs": None if data.inputs is None else [*data.inputs, *([data.label] if data.label else [])],
        "label": None,
        "loss": whole_loss,
        "metrics": found.metrics,
        "batch_size": train.batch_size or found.batch_size or 64,
        "evaluate_every": train.evaluate_every or (found.evaluate_every if validation is not None else None),
        "validation": _opened(validation) if isinstance(validation, str) else validation,
    }
    if found.optimizer is not None:
        given["optimizer"] = found.optimizer
    if train.epochs is None and train.steps is None and train.until is None and train.seconds is None:
        given["steps"] = found.steps
    return given


def network(recipe: Recipe, given: Shape | None) -> tuple[Training, list[Shape]]:
    """The content of a recipe's Caffe files, and the shape of one row of each input of the net.

    Args:
        recipe: the recipe.
        given: the shape of one row of the first input, if neither the prototxt nor the data gives it.
    """
    model, solver = recipe.model.caffe, recipe.train.solver
    first = input_names(model, solver)[:1]
    shapes = dict.fromkeys(first, given) if given else {}
    if given is None and recipe.data.source is not None:
        shapes = _row_shapes(recipe, _opened(recipe.data.source))
    found = training(model, solver, shapes={name: shape for name, shape in shapes.items() if shape is not None})
    rows = [tuple(found.shapes[name][1:]) for name in found.inputs]
    if given is not None and rows[0] != given:
        raise ConfigError(
            f"--input {'x'.join(map(str, given))} is not what the net takes: its prototxt says "
            f"{'x'.join(map(str, rows[0]))}; leave --input out"
        )
    return found, rows


def _opened(source: Any) -> Any:
    """The rows that a recipe names; texts that begin with lmdb: become LMDB sources."""
    if isinstance(source, str) and source.startswith("lmdb:"):
        return DatumSource(source.removeprefix("lmdb:"))
    return source


def _row_shapes(recipe: Recipe, source: Any) -> dict[str, tuple[int, ...]]:
    """The shape of one row of the net's inputs, from the data's first rows; matched by order, so names may differ."""
    names = input_names(recipe.model.caffe, recipe.train.solver)
    if isinstance(source, DatumSource):
        return {names[0]: source.shape}
    wanted = None if recipe.data.inputs is None else [*recipe.data.inputs]
    rows = first_rows(recipe, wanted, checked({"transform": recipe.data.transform})["transform"])
    return {name: tuple(value.shape[1:]) for name, value in zip(names, rows.values(), strict=False)}


def keep(model: nn.Module, folder: str) -> None:
    """Writes a trained network in Caffe's format to the run's folder, if that is a local folder."""
    if isinstance(model, Fed) and os.path.isdir(folder):
        caffe.save(model.net, os.path.join(folder, "model.caffemodel"))

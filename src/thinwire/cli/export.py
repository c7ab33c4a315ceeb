"""`thinwire export`: writes a saved model in a format that other programs run."""

from __future__ import annotations

import argparse
import os
from pathlib import PurePosixPath

from thinwire.errors import CheckpointError, ConfigError


def export(options: argparse.Namespace) -> int:
    """Writes the network of a saved TorchModel as an ONNX file. This needs neither Spark nor the network's code."""
    from thinwire.models.onnx_file import OUTPUT, write_onnx
    from thinwire.models.program import Program
    from thinwire.spark.model import WITHOUT, safetensors_of
    from thinwire.spark.storage import read_folder

    path = options.model.rstrip("/")
    metadata, saved = read_folder(path)
    if not saved.program:
        why = saved.more.get(WITHOUT, "it was saved by a version that stored no program, or is an estimator")
        raise CheckpointError(
            f"{path!r} holds no program to export: {why}. Save a fitted TorchModel whose network can be written as "
            "one; see docs/reference/spark.md#programs"
        )
    program, weights = Program.read(saved.program), safetensors_of(saved.weights)
    program.check_weights(weights)
    program.load_state_dict(weights, assign=True)
    names = metadata["paramMap"].get("inputCols")
    if not isinstance(names, list) or len(names) != len(program.inputs) or not all(isinstance(n, str) for n in names):
        raise CheckpointError(
            f"{path!r} has the input columns {names!r}, and a program of {len(program.inputs)} inputs; copy the folder "
            "again"
        )
    target = options.onnx or f"{PurePosixPath(path).name}.onnx"
    if not os.path.isdir(os.path.dirname(target) or "."):
        raise ConfigError(f"--onnx {target!r} is in a folder that does not exist; create it, or name another")
    write_onnx(program, names, target)
    for name, form in zip(names, program.inputs, strict=True):
        print(f"input   {name}: {form} a row")
    print(f"output  {OUTPUT}: what the network gives, before softmax")
    if not program.takes_columns and saved.code.get("transform") != {"kind": "value", "value": None}:
        print("The fit's transform is not in the file: give inputs as it makes them.")
    print(f"written to {target}")
    return 0

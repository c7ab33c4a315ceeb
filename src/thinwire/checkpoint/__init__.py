"""Serialisation of trees without pickle, and checkpoints that survive `kill -9`, a full disk and a damaged file."""

from thinwire.checkpoint.files import write_file
from thinwire.checkpoint.format import decode, encode
from thinwire.checkpoint.manifest import Manifest, Part
from thinwire.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Manifest", "Part", "decode", "encode", "write_file"]

"""The manifest: the file that turns a folder of parts into a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from dataclasses import dataclass, field

from thinwire.checkpoint.format import NEEDS, check_version
from thinwire.checkpoint.structure import damaged, flatten, parse, restore
from thinwire.errors import CheckpointError

MANIFEST_VERSION = 1
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,99}")
"""Pattern of names of checkpoints and parts."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Part:
    """One tree of a checkpoint, such as one worker's state.

    Attributes:
        name: Name that `CheckpointStore.read_part` takes.
        size_bytes: Length of the part's file.
        digest: BLAKE2b of the file, 32 bytes in hexadecimal.
    """

    name: str
    size_bytes: int
    digest: str

    def __post_init__(self) -> None:
        check_name(self.name, "part")
        if type(self.size_bytes) is not int or self.size_bytes < 0:
            raise _wrong(f"part {self.name!r} has size {self.size_bytes!r}", "a whole number of bytes")
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise _wrong(f"part {self.name!r} has digest {reprlib.repr(self.digest)}", "64 hexadecimal digits")

    @property
    def file_name(self) -> str:
        """Name of the part's file; files with other content have other names.

        A checkpoint that is written again under the same name, or by a worker that was already replaced, therefore
        leaves the files of complete checkpoints unchanged.
        """
        return f"{self.name}.{self.digest[:16]}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The parts of a complete checkpoint.

    Attributes:
        name: The checkpoint's folder.
        step: The training step of the checkpoint.
        parts: Its trees, one file each.
        meta: Plain values about the run; no tensors.
        version: Format version of the manifest itself.
    """

    name: str
    step: int
    parts: tuple[Part, ...]
    meta: dict[str, object] = field(default_factory=dict)
    version: int = MANIFEST_VERSION

    def __post_init__(self) -> None:
        check_name(self.name, "checkpoint")
        if type(self.step) is not int or self.step < 0:
            raise _wrong(f"checkpoint {self.name!r} has step {self.step!r}", "a whole number from 0")
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise _wrong(f"checkpoint {self.name!r} has parts {reprlib.repr(names)}", "parts of different names")
        check_version(self.version, MANIFEST_VERSION, NEEDS)

    def to_json(self) -> bytes:
        """The content of `manifest.json`."""
        meta, tensors = flatten(self.meta)
        if tensors:
            raise CheckpointError(
                f"meta.{next(iter(tensors))} of checkpoint {self.name!r} is a tensor, an array or bytes. A "
                "manifest holds plain values only. Write it as a part."
            )
        parts = [vars(part) for part in self.parts]
        content: dict[str, object] = {
            "version": self.version,
            "needs": NEEDS,
            "name": self.name,
            "step": self.step,
            "parts": parts,
        }
        content["meta"] = meta
        return json.dumps({**content, "digest": _digest(content)}, indent=2).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """The manifest from which `to_json` made the data.

        Raises:
            NewerFormatError: A newer thinwire wrote it.
            CheckpointError: The manifest is damaged.
        """
        content = parse(data, what="the manifest")
        if not isinstance(content, dict):
            raise damaged("the manifest is not a JSON object")
        digest = content.pop("digest", None)  # manifests of the first versions have none
        if digest is not None and digest != _digest(content):
            raise damaged("the manifest is not as it was written: its digest differs")
        check_version(content.get("version"), MANIFEST_VERSION, content.get("needs"))
        try:
            parts = tuple(Part(part["name"], part["size_bytes"], part["digest"]) for part in content["parts"])
            meta = restore(content["meta"], {})
            if not isinstance(meta, dict):
                raise damaged("the manifest's meta is not a dict")
            return Manifest(content["name"], content["step"], parts, meta, content["version"])
        except (KeyError, TypeError) as error:
            raise damaged(f"the manifest lacks something ({error!r})") from error


def _digest(content: dict[str, object]) -> str:
    return hashlib.blake2b(json.dumps(content, indent=2).encode(), digest_size=32).hexdigest()


def check_name(name: object, what: str) -> None:
    """Raises an error unless the name is safe as a file name within its folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(
            f"{reprlib.repr(name)} is not a name for a {what}",
            "up to 100 letters, digits, '_', '-' and single dots, not led by '-' or '.'",
        )


def _wrong(what: str, allowed: str) -> CheckpointError:
    return CheckpointError(f"{what}. Allowed: {allowed}. Correct it; if it was read from a file, the file is damaged.")

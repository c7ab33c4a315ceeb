"""Every decoder of bytes from outside, by name."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.fuzz import of_caffe, of_exchange, of_files, of_page, of_protocol, of_spark
from tests.fuzz.target import Target

CORPUS = Path(__file__).parent / "corpus"
TARGETS: dict[str, Target] = {
    target.name: target
    for module in (of_exchange, of_protocol, of_spark, of_files, of_caffe, of_page)
    for target in module.TARGETS
}


def unpack(name: str) -> list[bytes]:
    """A target's committed corpus: what a fuzzer found that reaches another part of the source, and what was once a
    finding.
    """
    path = CORPUS / f"{name}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(entry) for entry in sorted(archive.namelist())]

"""Check wheels and source distributions, as ``nox -s package`` does: ``python distributions.py FOLDER``.

One version everywhere, siblings pinned to it, types and licence inside, nothing foreign inside, extras by one name.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

LAYERS = ("core", "kernels", "transport", "ddp")
EXTRAS = {
    "core": [],
    "kernels": ["cpu", "triton"],
    "transport": ["mpi"],
    "ddp": ["cpu", "mpi", "plot", "safetensors", "triton"],
}


def check_wheel(path: Path, layer: str) -> Message:
    """The wheel's metadata, once its files are right."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    module = f"dynamiq_{layer}"
    for needed in (f"{module}/py.typed", f"{module}/__init__.py", f"{info}/licenses/LICENSE"):
        assert needed in names, f"{path.name} lacks {needed}"
    foreign = [name for name in names if not name.startswith((f"{module}/", f"{info}/"))]
    assert not foreign, f"{path.name} holds {foreign}"
    return metadata


def check_metadata(metadata: Message, layer: str, version: str) -> None:
    """Version, pins and extras."""
    assert metadata["Version"] == version, f"dynamiq-{layer} has version {metadata['Version']}, others {version}"
    assert metadata["License-Expression"] == "Apache-2.0"
    for requirement in metadata.get_all("Requires-Dist", []):
        if requirement.startswith("dynamiq-"):
            pinned = re.fullmatch(rf"dynamiq-\w+(\[\w+\])?=={re.escape(version)}(; extra == .*)?", requirement)
            assert pinned, f"dynamiq-{layer} does not pin {requirement} to {version}"
    extras = sorted(metadata.get_all("Provides-Extra", []))
    assert extras == EXTRAS[layer], f"dynamiq-{layer} has the extras {extras} instead of {EXTRAS[layer]}"


def check_source(path: Path, layer: str) -> None:
    """Everything is there to build and test from."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "pyproject.toml", f"src/dynamiq_{layer}/py.typed", "tests/conftest.py"}
    assert wanted <= names, f"{path.name} lacks {sorted(wanted - names)}"


def main(folder: Path) -> None:
    """Check all four."""
    versions: list[str] = []
    for layer in LAYERS:
        (wheel,) = folder.glob(f"dynamiq_{layer}-*.whl")
        (source,) = folder.glob(f"dynamiq_{layer}-*.tar.gz")
        metadata = check_wheel(wheel, layer)
        versions.append(metadata["Version"])
        check_metadata(metadata, layer, versions[0])
        check_source(source, layer)
        print(f"{wheel.name}, {source.name}: sound")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What a package must not need."""

import sys
from importlib.util import find_spec


def assert_absent(*names: str) -> None:
    """End with a message if one of the packages can be imported, or is already."""
    present = [name for name in names if name in sys.modules or find_spec(name)]
    if present:
        sys.exit(f"installed, though not asked for: {', '.join(present)}")

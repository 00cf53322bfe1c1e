"""Check which packages of shardwalk this Python can import, and where from.

    python tools/check_isolation.py shardwalk.mesh --absent shardwalk.parallelizer_core

Exits with a message if a named package is not an installed wheel, or an absent one can be found.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import site
import sys
from pathlib import Path


def main() -> None:
    """Check the packages named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("present", nargs="+")
    parser.add_argument("--absent", nargs="*", default=[])
    args = parser.parse_args()
    packages = [Path(path).resolve() for path in site.getsitepackages()]
    for name in args.present:
        origin = Path(str(importlib.import_module(name).__file__)).resolve()
        if not any(path in origin.parents for path in packages):
            sys.exit(f"{name} comes from {origin}, not from an installed wheel")
    found = [name for name in args.absent if importlib.util.find_spec(name)]
    if found:
        sys.exit(f"{', '.join(found)} can be imported, though nothing installed here declares it")
    print(f"present: {', '.join(args.present)}; absent: {', '.join(args.absent) or 'no other'}")


if __name__ == "__main__":
    main()

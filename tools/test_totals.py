"""Add up the JUnit reports of several pytest runs and print one closing line.

    python tools/test_totals.py .nox/reports

Exits with 1 if no test ran or one failed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def add_up(folder: Path) -> Counter[str]:
    """Count tests, failures, errors and skips over all reports in `folder`."""
    totals: Counter[str] = Counter()
    for file in sorted(folder.glob("*.xml")):
        counts = Counter[str]()
        for suite in ET.parse(file).getroot().iter("testsuite"):
            for key in ("tests", "failures", "errors", "skipped"):
                counts[key] += int(suite.get(key, 0))
        print(f"{file.stem}: {counts['tests']} tests")
        totals += counts
    return totals


def main() -> int:
    """Print the totals of the folder named on the command line."""
    totals = add_up(Path(sys.argv[1]))
    failed = totals["failures"] + totals["errors"]
    passed = totals["tests"] - failed - totals["skipped"]
    print(f"{passed} passed, {failed} failed, {totals['skipped']} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

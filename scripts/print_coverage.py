"""Print how much of src the tests have run, lines and branches together, and end with 1 below a bound."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="what slipcover wrote")
    parser.add_argument("--at-least", type=float, default=0.0, help="percent")
    arguments = parser.parse_args()
    summary = json.loads(arguments.file.read_text())["summary"]
    covered = summary["covered_lines"] + summary["covered_branches"]
    total = covered + summary["missing_lines"] + summary["missing_branches"]
    share = 100 * covered / total if total else 0.0
    print(f"branch coverage of src: {share:.1f} % of {total:,} lines and branches ({arguments.file})")
    if share < arguments.at_least:
        print(f"that is less than {arguments.at_least:g} %")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

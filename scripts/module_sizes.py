"""Keep modules small enough to read in one sitting: says which pass 300 lines, fails above 450."""

from __future__ import annotations

import sys
from pathlib import Path

SOFT, HARD = 300, 450


def main() -> int:
    """Print the long modules under elastic/; 1 if one is too long."""
    root = Path(__file__).parent.parent
    sizes = {path: len(path.read_text("utf-8").splitlines()) for path in sorted(root.glob("elastic/**/*.py"))}
    for path, lines in sizes.items():
        if lines > SOFT:
            verdict = f"above the limit of {HARD}: split it" if lines > HARD else f"above {SOFT}"
            print(f"{path.relative_to(root)}: {lines} lines, {verdict}")
    print(f"{len(sizes)} modules, {sum(sizes.values())} lines")
    return int(max(sizes.values(), default=0) > HARD)


if __name__ == "__main__":
    sys.exit(main())

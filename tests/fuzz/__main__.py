import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import fuzz
from tests.fuzz.cases import make_place


def main() -> int:
    parser = argparse.ArgumentParser(description=fuzz.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in fuzz.KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the name of one case")
    parser.add_argument("--all", action="store_true", help="show those that are not bad, too")
    asked = parser.parse_args()
    wanted = {kind: range(number) for kind in fuzz.KINDS if (number := getattr(asked, kind))}
    if asked.only:
        kind, seed, number = asked.only.split("-")
        asked.seed, wanted = int(seed), {kind: range(int(number), int(number) + 1)}
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        place = make_place(Path(folder))
        for kind, numbers in wanted.items():
            counts, started = Counter[str](), time.monotonic()
            for name, ends, why in fuzz.run(place, kind, numbers, asked.seed):
                counts[ends] += 1
                bad += ends in fuzz.BAD
                if ends in fuzz.BAD or asked.only or asked.all:
                    print(f"{name} {ends}: {why}", flush=True)
            print(kind, dict(counts), f"{time.monotonic() - started:.0f} s", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

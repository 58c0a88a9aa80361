"""Compresses the files of a wheel again, with Zopfli: three per cent less, in a minute.

usage: python compress_wheel.py WHEEL
"""

import os
import sys
import zipfile

import zopfli


def compress(wheel: str) -> None:
    part = f"{wheel}.part"
    with zipfile.ZipFile(wheel) as old, zopfli.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry))
    os.replace(part, wheel)


if __name__ == "__main__":
    compress(sys.argv[1])

"""Prints the newest version of glibc that the extensions of a wheel need, such as 2.34.

usage: python wheel_glibc.py WHEEL

Prints an empty line if the wheel has no extension, or none that links glibc.
"""

import re
import sys
import zipfile


def newest(wheel: str) -> tuple[int, int] | None:
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                # The versions of needed symbols are texts in the table of dynamic strings, between zero bytes.
                versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)[.\d]*(?=\0)", archive.read(name))
                found += [(int(major), int(minor)) for major, minor in versions]
    return max(found, default=None)


if __name__ == "__main__":
    version = newest(sys.argv[1])
    print(f"{version[0]}.{version[1]}" if version else "")

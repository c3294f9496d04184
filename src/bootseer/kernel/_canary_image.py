"""The image of the canaries, ready made: an EROFS of two files whose bytes follow from their names. Needs no tool."""

from __future__ import annotations

import base64
import hashlib
import zlib
from pathlib import Path

FILE_SIZE = 1 << 20

_META = (
    b"c-rlgJ*vV$6h`kT7J|iFf`x^Jgs9D{9=ZdU;16S)5VL@|1D9a&7T^+Gf{lH&7qqZdM?Hc_6fDJiAe=9ECc~Wz5m6N7TUoF6>2eni@-CO8DtYRM"
    b"<CSwZcl-N65Ra^lk|*bt<oZSNL+)R2&!#Q%$NTNhS>!TmRqVUfTduoYBRAbF8suM>J<sb6V;lADFo>*N=JY>4ul`*2R37Gik9k=&oM5DkecZww"
    b"+{GbI@B~ls4A1cbr+6#b{pa58-_SoUV;{G02X}FZ6Fk9FJi~Lmz$xAu{r?q3Q4~e_K2C7%FjN"
)
"""The meta part, compressed: owner 0, mtime 0, 64 KiB chunks, the data in the order of `data`."""


def contents(name: str) -> bytes:
    """The bytes of canary file ``name`` (``before`` or ``after``): no two chunks alike, none zero."""
    return hashlib.shake_128(name.encode()).digest(FILE_SIZE)


def data() -> bytes:
    """The data part: ``after``, then ``before``."""
    return contents("after") + contents("before")


def write_meta(path: Path) -> None:
    """Write the meta part to ``path``."""
    path.write_bytes(zlib.decompress(base64.b85decode(_META)))

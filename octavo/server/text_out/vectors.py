"""VectorForm: embeddings as bytes, in the number formats and byte orders that vLLM's clients can ask for."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["VectorForm"]

Float32Array = npt.NDArray[np.float32]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a vector lies among the bytes of all."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: list[int]


@dataclass(frozen=True, slots=True)
class VectorForm:
    dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
    endianness: Literal["native", "little", "big"]

    def encode(self, vector: Float32Array) -> bytes:
        """Numbers are rounded to the nearest that the format has, halves to even ones."""
        order = {"native": sys.byteorder, "little": "little", "big": "big"}[self.endianness]
        match self.dtype:
            case "float32" | "float16":
                numbers: npt.NDArray[np.generic] = vector.astype(self.dtype)
            case "bfloat16":
                bits = vector.view(np.uint32).astype(np.uint64)
                numbers = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
            case "fp8_e4m3":
                return _rounded(vector, num_mantissa_bits=3, bias=7, num_finite=127).tobytes()
            case "fp8_e5m2":
                return _rounded(vector, num_mantissa_bits=2, bias=15, num_finite=124).tobytes()
        return (numbers.byteswap() if order != sys.byteorder else numbers).tobytes()

    def place(self, index: int, start: int, end: int, size: int) -> Place:
        return Place(
            index=index, embed_dtype=self.dtype, endianness=self.endianness, start=start, end=end, shape=[size]
        )


def _rounded(vector: Float32Array, num_mantissa_bits: int, bias: int, num_finite: int) -> npt.NDArray[np.uint8]:
    """Eight-bit floats: codes count the positive values up, and the first bit is the sign."""
    middles = _middles(num_mantissa_bits, bias, num_finite)
    sizes = np.abs(vector)
    below, above = np.searchsorted(middles, sizes, "left"), np.searchsorted(middles, sizes, "right")
    codes = np.where(below == above, below, below + (below & 1))  # halfway: the even code
    return (codes | np.where(np.signbit(vector), 0x80, 0)).astype(np.uint8)


@cache
def _middles(num_mantissa_bits: int, bias: int, num_finite: int) -> npt.NDArray[np.float64]:
    codes = np.arange(num_finite)
    exponents, mantissas = codes >> num_mantissa_bits, codes & ((1 << num_mantissa_bits) - 1)
    fractions = mantissas / (1 << num_mantissa_bits)
    values = np.where(exponents == 0, fractions, 1 + fractions) * 2.0 ** (np.maximum(exponents, 1) - bias)
    return np.asarray((values[:-1] + values[1:]) / 2, np.float64)

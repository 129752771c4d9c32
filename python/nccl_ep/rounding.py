"""BF16 and FP8 as NumPy holds them, in bits: values to the nearest (ties to even), and back to float32."""
import numpy as np

# Bits of the fraction, least exponent, largest finite code, code of what is larger, code of NaN.
_FORMATS = {'bfloat16': (7, -126, 0x7F7F, 0x7F80, 0x7FC0), 'float8_e5m2': (2, -14, 0x7B, 0x7C, 0x7F),
            'float8_e4m3fn': (3, -6, 0x7E, 0x7F, 0x7F)}  # e4m3fn has no infinity
BITS = {'bfloat16': np.uint16, 'float8_e5m2': np.uint8, 'float8_e4m3fn': np.uint8}


def encode(values, dtype):
    """The bits of floating-point values."""
    fraction, least, largest, beyond, nan = _FORMATS[dtype]
    with np.errstate(invalid='ignore'):  # a signalling NaN
        values = np.asarray(values, np.float64)
    size = np.where(np.isfinite(values), np.abs(values), 0)
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, least), least)
    code = np.rint(np.ldexp(size, fraction - exponent)).astype(np.int64) + ((exponent - least).astype(np.int64) << fraction)
    code = np.where((code > largest) | np.isinf(values), beyond, code)
    code = np.where(np.isnan(values), nan, code)
    sign = np.signbit(values).astype(np.int64) << (8 * np.dtype(BITS[dtype]).itemsize - 1)
    return (code | sign).astype(BITS[dtype])


def decode(bits, dtype):
    """float32 of bits; exact."""
    fraction, least, largest, beyond, nan = _FORMATS[dtype]
    bits = np.asarray(bits).astype(np.int64)
    top = 8 * np.dtype(BITS[dtype]).itemsize - 1
    code = bits & ((1 << top) - 1)
    field, rest = code >> fraction, code & ((1 << fraction) - 1)
    size = np.ldexp(np.where(field > 0, rest + (1 << fraction), rest).astype(np.float64),
                    (np.maximum(field, 1) - 1 + least - fraction).astype(np.int64))
    size = np.where(code <= largest, size, np.where((code == beyond) & (beyond != nan), np.inf, np.nan))
    return np.where(bits >> top, -size, size).astype(np.float32)

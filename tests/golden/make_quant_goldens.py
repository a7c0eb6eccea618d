#!/usr/bin/env python3
"""Records quant_goldens.bin: random blocks of every weight format with the fp32 values they decode to.

The decoder asked is the `gguf` package (recorded with gguf 0.19.0, numpy 2.4.6):

    pip install gguf==0.19.0 && python tests/golden/make_quant_goldens.py

File: "LKQG", u32 number of entries; per entry u32 type id, u32 bytes, u32 values, the bytes, the values (little-endian).
Every byte of a block is random except its half-precision scales, which are finite normal numbers of either sign.
"""
import pathlib
import struct

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

# Byte offsets of the half-precision fields inside a block.
HALVES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.IQ4_NL: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_XS: [0],
}


def blocks_of(rng, kind, count):
    size = GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for offset in HALVES[kind]:
        scale = (rng.uniform(2.0**-10, 2.0, count) * rng.choice([-1, 1], count)).astype(np.float16)
        data[:, offset:offset + 2] = scale.view(np.uint8).reshape(count, 2)
    return data


def floats_of(rng, kind):
    values = rng.standard_normal(64).astype(np.float32)
    if kind == T.F32:
        return values.view(np.uint8)
    if kind == T.F16:
        values[:4] = [6e-8, -6e-8, 65504.0, 0.0]  # subnormals and the largest half
        return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def main():
    rng = np.random.default_rng(20240607)
    entries = []
    for kind in [T.F32, T.F16, T.BF16]:
        raw = floats_of(rng, kind)
        entries.append((kind, raw, dequantize(raw, kind)))
    for kind in HALVES:
        raw = blocks_of(rng, kind, 3 if GGML_QUANT_SIZES[kind][0] == 256 else 5)
        entries.append((kind, raw, dequantize(raw, kind)))
    out = bytearray(b"LKQG" + struct.pack("<I", len(entries)))
    for kind, raw, values in entries:
        values = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
        assert np.isfinite(values).all()
        out += struct.pack("<III", int(kind), raw.size, values.size) + raw.tobytes() + values.tobytes()
    path = pathlib.Path(__file__).with_name("quant_goldens.bin")
    path.write_bytes(out)
    print(path, len(out), "bytes")


if __name__ == "__main__":
    main()

"""The tensor types a GGUF may name: block length, bytes per block and the name people use.

A table of our own, since importing gguf costs numpy and 100 ms; a test compares it with gguf's GGML_QUANT_SIZES.
Ids that are in no table are sized from the file itself: see `header`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`block_nbytes` bytes hold `block` elements of a row."""

    name: str
    block: int
    block_nbytes: int


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

AMBIGUOUS: dict[int, str] = {
    # llama.cpp gave 42 to Q2_0 in 2026; forks had used it for types of another size. The file says which it is.
    42: "Q2_0 in recent llama.cpp, other types in its forks",
    4: "Q4_2, removed from llama.cpp in 2023",
    5: "Q4_3, removed from llama.cpp in 2023",
    31: "Q4_0_4_4, removed from llama.cpp in 2024",
    32: "Q4_0_4_8, removed from llama.cpp in 2024",
    33: "Q4_0_8_8, removed from llama.cpp in 2024",
    36: "IQ4_NL_4_4 in llama.cpp of 2024, I2_S in BitNet forks",
    37: "IQ4_NL_4_8, removed from llama.cpp in 2024",
    38: "IQ4_NL_8_8, removed from llama.cpp in 2024",
}
"""Ids whose size cannot be told from the number, and what they have meant."""


def type_name(type_id: int) -> str:
    """Q4_K for 12; "type 153" for an id that is in no table."""
    known = GGML_TYPES.get(type_id)
    return known.name if known else f"type {type_id}"

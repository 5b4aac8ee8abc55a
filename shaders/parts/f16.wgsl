// IEEE half precision in 16 of 32 bits, with no feature needed.

// The low and the high half of a word.
fn f16_decode2(word: u32) -> vec2<f32> {
    return unpack2x16float(word);
}

// Rounds to nearest even in the low half; too large becomes infinity, NaN stays NaN. (pack2x16float leaves all three open.)
fn f16_encode(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return sign | 0x7e00u;
    }
    if magnitude >= 0x477ff000u { // 65520 and more
        return sign | 0x7c00u;
    }
    // Below 2⁻¹⁴ halves are spaced 2⁻²⁴: adding 0.5 (spaced 2⁻²⁴ in f32) rounds to that grid.
    if magnitude < 0x38800000u {
        return sign | (bitcast<u32>(bitcast<f32>(magnitude) + 0.5) - 0x3f000000u);
    }
    return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13u) & 1u)) >> 13u);
}

// IEEE half precision in 16 of 32 bits, with no feature needed.

// The low and the high half of a word.
fn f16_decode2(word: u32) -> vec2<f32> {
    return unpack2x16float(word);
}

// Two values in one word, rounded to nearest even; from 65520 on infinity, NaN stays NaN. WGSL leaves all of it open for
// pack2x16float (one adapter makes NaN of 10⁶, and 0 of numbers that round to the smallest), so by bits.
fn f16_encode2(x: vec2<f32>) -> u32 {
    let bits = bitcast<vec2<u32>>(x);
    let magnitude = bits & vec2<u32>(0x7fffffffu);
    // The exponent is counted from another bias; what rounding carries goes into it, up to infinity.
    let odd = (magnitude >> vec2<u32>(13u)) & vec2<u32>(1u);
    let normal = (magnitude - 0x38000000u + 0xfffu + odd) >> vec2<u32>(13u);
    // Below 2⁻¹⁴ in units of 2⁻²⁴; the significand, 24 bits, is 0 after a shift by 25.
    let significand = (magnitude & vec2<u32>(0x7fffffu)) | vec2<u32>(0x800000u);
    let shift = min(126u - min(magnitude >> vec2<u32>(23u), vec2<u32>(112u)), vec2<u32>(25u));
    let below_half = (vec2<u32>(1u) << (shift - 1u)) - 1u;
    let small = (significand + below_half + ((significand >> shift) & vec2<u32>(1u))) >> shift;
    var rounded = select(min(normal, vec2<u32>(0x7c00u)), small, magnitude < vec2<u32>(0x38800000u));
    rounded = select(rounded, vec2<u32>(0x7e00u), magnitude > vec2<u32>(0x7f800000u));
    let signed = rounded | ((bits >> vec2<u32>(16u)) & vec2<u32>(0x8000u));
    return signed.x | (signed.y << 16u);
}

// bfloat16, the upper half of an f32.

// The low and the high half of a word.
fn bf16_decode2(word: u32) -> vec2<f32> {
    return bitcast<vec2<f32>>(vec2<u32>(word << 16u, word & 0xffff0000u));
}

// Two values in one word, rounded to nearest even; NaN stays NaN.
fn bf16_encode2(x: vec2<f32>) -> u32 {
    let bits = bitcast<vec2<u32>>(x);
    let nan = (bits & vec2<u32>(0x7fffffffu)) > vec2<u32>(0x7f800000u);
    let rounded = select(bits + 0x7fffu + ((bits >> vec2<u32>(16u)) & vec2<u32>(1u)), bits | vec2<u32>(0x400000u), nan);
    return (rounded.x >> 16u) | (rounded.y & 0xffff0000u);
}

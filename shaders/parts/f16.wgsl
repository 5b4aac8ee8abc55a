// IEEE half precision in 16 of 32 bits, with no feature needed.

// The low and the high half of a word.
fn f16_decode2(word: u32) -> vec2<f32> {
    return unpack2x16float(word);
}

// Two values in one word, rounded; from 65520 on infinity, NaN stays NaN. WGSL leaves both open for pack2x16float (one
// adapter makes NaN of 10⁶), so they are made by bits.
fn f16_encode2(x: vec2<f32>) -> u32 {
    let bits = bitcast<vec2<u32>>(x);
    let magnitude = bits & vec2<u32>(0x7fffffffu);
    let large = magnitude >= vec2<u32>(0x477ff000u);
    let special = ((bits >> vec2<u32>(16u)) & vec2<u32>(0x8000u)) + select(vec2<u32>(0x7c00u), vec2<u32>(0x7e00u), magnitude > vec2<u32>(0x7f800000u));
    let chosen = select(vec2<u32>(), special, large);
    return pack2x16float(select(x, vec2<f32>(), large)) | chosen.x | (chosen.y << 16u);
}

// IEEE half precision in 16 of 32 bits, with no feature needed.

// The low and the high half of a word.
fn f16_decode2(word: u32) -> vec2<f32> {
    return unpack2x16float(word);
}

// Two values in one word. WGSL leaves the rounding open, and what becomes of numbers past 65504; adapters round to nearest
// and give infinity. Doing it by hand costs 12 operations an element, and a store loop too long to unroll would push the
// accumulators of a whole kernel to memory (measured on the H200: 4 against 20 TFLOP/s).
fn f16_encode2(x: vec2<f32>) -> u32 {
    return pack2x16float(x);
}

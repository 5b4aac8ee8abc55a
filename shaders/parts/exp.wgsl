// exp(x) for x ≤ 0. The argument is kept above −200 (exp is 0 in f32 from −104 on), because WGSL does not promise
// that an overflow to −∞ behaves. NaN stays NaN, found by its bits: `max` would hide it, and one adapter's exp2 makes ∞ of it.
fn exp_below(x: vec4<f32>) -> vec4<f32> {
    let is_nan = (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
    return select(exp2(max(x, vec4<f32>(-200.0)) * 1.4426950408889634), x, is_nan);
}

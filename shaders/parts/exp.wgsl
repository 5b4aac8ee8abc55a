// exp(x) for x ≤ 0. The argument is kept above −200 (exp is 0 in f32 from −104 on), because WGSL does not promise
// that an overflow to −∞ behaves. What becomes of NaN is open: compilers and adapters differ.
fn exp_below(x: vec4<f32>) -> vec4<f32> {
    return exp2(select(x, vec4<f32>(-200.0), x < vec4<f32>(-200.0)) * 1.4426950408889634);
}

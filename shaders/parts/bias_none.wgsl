// No additive bias.
const BIAS: bool = false;

fn bias_at(offsets: vec4<u32>) -> vec4<f32> {
    return vec4<f32>();
}

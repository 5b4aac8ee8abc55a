// Additive bias of four rows, one element each.
@binding(7) import package::parts::load_f32_scalar as bias;

const BIAS: bool = true;

fn bias_at(offsets: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(bias::load1(offsets.x), bias::load1(offsets.y), bias::load1(offsets.z), bias::load1(offsets.w));
}

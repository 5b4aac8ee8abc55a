// f16 where every row starts at a multiple of 4 elements and has a multiple of 4.
import package::parts::f16::f16_encode2;

const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read_write> data: array<vec2<u32>>;

// Stores the first `count` of four elements from element `i` on.
fn store4(i: u32, x: vec4<f32>, count: i32) {
    data[i / 4u] = vec2<u32>(f16_encode2(x.xy), f16_encode2(x.zw));
}

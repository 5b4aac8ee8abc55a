// bf16 where every row starts at a multiple of 4 elements and has a multiple of 4.
import package::parts::bf16::bf16_encode2;

const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read_write> data: array<vec2<u32>>;

// Stores the first `count` of four elements from element `i` on.
fn store4(i: u32, x: vec4<f32>, count: i32) {
    data[i / 4u] = vec2<u32>(bf16_encode2(x.xy), bf16_encode2(x.zw));
}

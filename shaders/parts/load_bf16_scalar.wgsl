// bf16 at any offset, two to a word, the first in the low half. Twin of load_bf16.wgsl.
import package::parts::bf16::bf16_decode2;

const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read> data: array<u32>;

fn load1(i: u32) -> f32 {
    let pair = bf16_decode2(data[i / 2u]);
    return select(pair.x, pair.y, (i & 1u) == 1u);
}

// Four elements from element `i` on, the first `count` of which exist; zeros for the others.
fn load4(i: u32, count: i32) -> vec4<f32> {
    var x = vec4<f32>();
    if count > 0 { x.x = load1(i); }
    if count > 1 { x.y = load1(i + 1u); }
    if count > 2 { x.z = load1(i + 2u); }
    if count > 3 { x.w = load1(i + 3u); }
    return x;
}

// Eight elements in the same way.
fn load8(i: u32, count: i32) -> mat2x4<f32> {
    return mat2x4<f32>(load4(i, count), load4(i + 4u, count - 4));
}

// f16 where every row starts at a multiple of 4 elements and has a multiple of 4.
import package::parts::f16::f16_decode2;

const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read> data: array<vec2<u32>>;

// Four elements from element `i` on, the first `count` of which exist; zeros for the others.
fn load4(i: u32, count: i32) -> vec4<f32> {
    if count <= 0 {
        return vec4<f32>();
    }
    let words = data[i / 4u];
    return vec4<f32>(f16_decode2(words.x), f16_decode2(words.y));
}

// Eight elements in the same way.
fn load8(i: u32, count: i32) -> mat2x4<f32> {
    return mat2x4<f32>(load4(i, count), load4(i + 4u, count - 4));
}

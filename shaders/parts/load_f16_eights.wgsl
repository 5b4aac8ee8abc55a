// f16 where every row starts at a multiple of 8 elements and has a multiple of 8: 16 bytes at a time. Twin of load_f16.wgsl.
import package::parts::f16::f16_decode2;

const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read> data: array<vec4<u32>>;

// Eight elements from element `i` on, if `count` is positive, otherwise zeros.
fn load8(i: u32, count: i32) -> mat2x4<f32> {
    if count <= 0 {
        return mat2x4<f32>();
    }
    let words = data[i / 8u];
    return mat2x4<f32>(
        vec4<f32>(f16_decode2(words.x), f16_decode2(words.y)),
        vec4<f32>(f16_decode2(words.z), f16_decode2(words.w)),
    );
}

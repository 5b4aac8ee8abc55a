// bf16 where every row starts at a multiple of 8 elements and has a multiple of 8: 16 bytes at a time. Twin of load_bf16.wgsl.
import package::parts::bf16::bf16_decode2;

const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read> data: array<vec4<u32>>;

// Eight elements from element `i` on, if `count` is positive, otherwise zeros.
fn load8(i: u32, count: i32) -> mat2x4<f32> {
    if count <= 0 {
        return mat2x4<f32>();
    }
    let words = data[i / 8u];
    return mat2x4<f32>(
        vec4<f32>(bf16_decode2(words.x), bf16_decode2(words.y)),
        vec4<f32>(bf16_decode2(words.z), bf16_decode2(words.w)),
    );
}

// f16 at any offset. The other half of a word may belong to another invocation, or to no one here: each half is cleared
// and set by atomics that touch nothing else. Twin of store_f16.wgsl.
import package::parts::f16::f16_encode2;

const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read_write> data: array<atomic<u32>>;

fn store1(i: u32, x: f32) {
    let shift = 16u * (i & 1u);
    atomicAnd(&data[i / 2u], 0xffff0000u >> shift);
    atomicOr(&data[i / 2u], f16_encode2(vec2<f32>(x, 0.0)) << shift);
}

// Stores the first `count` of four elements from element `i` on.
fn store4(i: u32, x: vec4<f32>, count: i32) {
    if count > 0 { store1(i, x.x); }
    if count > 1 { store1(i + 1u, x.y); }
    if count > 2 { store1(i + 2u, x.z); }
    if count > 3 { store1(i + 3u, x.w); }
}

// f32 at any offset. Twin of store_f32.wgsl.
const BINDING: u32 = 0u;

@group(0) @binding(BINDING) var<storage, read_write> data: array<f32>;

// Stores the first `count` of four elements from element `i` on.
fn store4(i: u32, x: vec4<f32>, count: i32) {
    if count > 0 { data[i] = x.x; }
    if count > 1 { data[i + 1u] = x.y; }
    if count > 2 { data[i + 2u] = x.z; }
    if count > 3 { data[i + 3u] = x.w; }
}

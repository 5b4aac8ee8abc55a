// An item that has some keys of its rows: its state (unnormalised output, m, l) goes to slot
// (item.slot + row in the item) · kv_heads + kv_head, v_dim rounded up to 4 floats and then (m, l, 0, 0). Twin of dest_out.wgsl.
@group(0) @binding(9) var<storage, read_write> partials: array<vec4<f32>>;

struct Done {
    offset: vec4<u32>, // in floats
    factor: vec4<f32>,
}

fn finish4(item: Item, kv_head: u32, row: vec4<u32>, head: vec4<u32>, m: vec4<f32>, l: vec4<f32>, stored: vec4<bool>) -> Done {
    let vecs = (params.v_dim + 3u) / 4u;
    let start = ((item.slot + row - item.row_begin) * strides.kv_heads + kv_head) * (vecs + 1u);
    if stored.x { partials[start.x + vecs] = vec4<f32>(m.x, l.x, 0.0, 0.0); }
    if stored.y { partials[start.y + vecs] = vec4<f32>(m.y, l.y, 0.0, 0.0); }
    if stored.z { partials[start.z + vecs] = vec4<f32>(m.z, l.z, 0.0, 0.0); }
    if stored.w { partials[start.w + vecs] = vec4<f32>(m.w, l.w, 0.0, 0.0); }
    return Done(4u * start, vec4<f32>(1.0));
}

fn put(offset: u32, value: vec4<f32>, count: i32) {
    partials[offset / 4u] = value;
}

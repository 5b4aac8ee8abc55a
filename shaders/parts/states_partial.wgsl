// States that split items of attention.wgsl left in a workspace (see dest_partial.wgsl).
// Workgroup x: merge item, y: KV head, z: row in the item.
import package::parts::strides::strides;

struct MergeItem {
    out: u32,
    lse: u32,
    row_begin: u32,
    row_count: u32,
    slot: u32,   // of the first state's first row
    states: u32, // state i starts at slot + i · row_count
    pad_a: u32,
    pad_b: u32,
}

@group(0) @binding(3) var<storage, read> items: array<MergeItem>;
@group(0) @binding(4) var<storage, read> partials: array<vec4<f32>>;

fn locate(workgroup: vec3<u32>) -> Place {
    let item = items[workgroup.x];
    let row = item.row_begin + workgroup.z;
    let token = row / params.group;
    let head = workgroup.y * params.group + row % params.group;
    let size = (params.v_dim + 3u) / 4u + 1u; // in vec4s
    return Place(
        workgroup.z < item.row_count,
        item.states,
        ((item.slot + workgroup.z) * strides.kv_heads + workgroup.y) * size,
        item.row_count * strides.kv_heads * size,
        head,
        item.out + token * strides.out_seq + head * strides.out_head,
        item.lse + head * strides.lse_head + token,
    );
}

fn state(place: Place, i: u32) -> vec2<f32> {
    return partials[place.first + i * place.pitch + (params.v_dim + 3u) / 4u].xy;
}

fn state_out(place: Place, i: u32, dim: u32, count: i32) -> vec4<f32> {
    return partials[place.first + i * place.pitch + dim / 4u];
}

// States that split items of attention.wgsl left in a workspace (see dest_partial.wgsl).
// Workgroup x: merge item, y: KV head, z: row in the item.
import package::parts::strides::strides;

struct MergeItem {
    out: u32,
    lse: u32,
    row_begin: u32,
    row_count: u32,
    slots: u32,  // where in the plan the slots of the states' first rows begin
    states: u32,
}

@group(0) @binding(3) var<storage, read> plan: array<u32>;
@group(0) @binding(4) var<storage, read> partials: array<vec4<f32>>;

fn locate(workgroup: vec3<u32>) -> Place {
    let i = 6u * workgroup.x;
    let item = MergeItem(plan[i], plan[i + 1u], plan[i + 2u], plan[i + 3u], plan[i + 4u], plan[i + 5u]);
    let row = item.row_begin + workgroup.z;
    let token = row / params.group;
    let head = workgroup.y * params.group + row % params.group;
    return Place(
        workgroup.z < item.row_count,
        item.states,
        item.slots,
        workgroup.z * strides.kv_heads + workgroup.y,
        head,
        item.out + token * strides.out_seq + head * strides.out_head,
        item.lse + head * strides.lse_head + token,
    );
}

// Where state `i` begins, in vec4s.
fn start_of(place: Place, i: u32) -> u32 {
    return (plan[place.first + i] * strides.kv_heads + place.pitch) * ((params.v_dim + 3u) / 4u + 1u);
}

fn state(place: Place, i: u32) -> vec2<f32> {
    return partials[start_of(place, i) + (params.v_dim + 3u) / 4u].xy;
}

fn state_out(place: Place, i: u32, dim: u32, count: i32) -> vec4<f32> {
    return partials[start_of(place, i) + dim / 4u];
}

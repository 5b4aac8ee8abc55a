// A caller's states: O normalised, LSE in natural logarithm, ±∞ (by bits) is an empty state. Twin of states_partial.wgsl.
// Workgroup x: token (chunks of 65,535 in z), y: head.
@binding(4) import package::parts::load_f32 as states;

struct Strides {
    state: u32,
    seq: u32,
    head: u32,
    lse_state: u32,
    lse_head: u32,
    out_seq: u32,
    out_head: u32,
    out_lse_head: u32,
    tokens: u32,
    states: u32,
    first: u32,
    out_first: u32,
}

@group(0) @binding(1) var<uniform> strides: Strides;
@group(0) @binding(5) var<storage, read> state_lse: array<u32>;

fn locate(workgroup: vec3<u32>) -> Place {
    let token = workgroup.x + 65535u * workgroup.z;
    let head = workgroup.y;
    return Place(
        token < strides.tokens,
        strides.states,
        strides.first + token * strides.seq + head * strides.head,
        token + head * strides.lse_head,
        head,
        strides.out_first + token * strides.out_seq + head * strides.out_head,
        token + head * strides.out_lse_head,
    );
}

// As m and l: the LSE and 1, or nothing.
fn state(place: Place, i: u32) -> vec2<f32> {
    let bits = state_lse[place.pitch + i * strides.lse_state];
    if (bits & 0x7fffffffu) == 0x7f800000u {
        return vec2<f32>();
    }
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return vec2<f32>(0.0, bitcast<f32>(bits)); // a NaN must not depend on what exp makes of it
    }
    return vec2<f32>(bitcast<f32>(bits), 1.0);
}

fn state_out(place: Place, i: u32, dim: u32, count: i32) -> vec4<f32> {
    return states::load4(place.first + i * strides.state + dim, count);
}

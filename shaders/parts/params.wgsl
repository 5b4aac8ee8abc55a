// What a descriptor fixes.
const LEFT_UNLIMITED: u32 = 1u; // bits of `flags`
const RIGHT_UNLIMITED: u32 = 2u;
const ALIBI: u32 = 4u;
const SINKS: u32 = 8u;

struct Params {
    scale: f32,
    softcap: f32, // 0: none
    left: i32,    // keys p − left … p + right are visible; causal is right = 0
    right: i32,
    flags: u32,
    group: u32,
    qk_dim: u32,
    v_dim: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<uniform> heads: array<vec4<f32>, 1024>; // two heads each: slope, sink, slope, sink

fn slope_of(head: u32) -> f32 {
    let pair = heads[head / 2u];
    return select(pair.x, pair.z, (head & 1u) == 1u);
}

fn sink_of(head: u32) -> f32 {
    let pair = heads[head / 2u];
    return select(pair.y, pair.w, (head & 1u) == 1u);
}

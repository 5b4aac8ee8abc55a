// What the three passes of the unfused attention share.
//
// A *plane* is one KV head of one sequence with the packed rows of its query heads: row = token · group + member. A dispatch
// serves the planes from `first_plane` on, and the scores buffer holds only those: rows of `pitch` vec4s, in the last of
// which the softmax leaves the factor that makes the row's weights sum to 1.
struct Params {
    scale: f32,
    group: u32,
    rows: u32, // of a plane
    kv_len: u32,
    kv_heads: u32,
    first_plane: u32,
    start: i32, // position of token 0 among the keys
    causal: u32,
    qk_dim: u32,
    v_dim: u32,
    pitch: u32,
    q_first: u32, // of each tensor in elements: the first one, and the distances between neighbours
    q_batch: u32,
    q_seq: u32,
    q_head: u32,
    k_first: u32,
    k_batch: u32,
    k_seq: u32,
    k_head: u32,
    v_first: u32,
    v_batch: u32,
    v_seq: u32,
    v_head: u32,
    out_first: u32,
    out_batch: u32,
    out_seq: u32,
    out_head: u32,
    pad: u32,
}

@group(0) @binding(0) var<uniform> params: Params;

// A row sees the keys before this one.
fn key_end(row: u32) -> u32 {
    if params.causal == 0u {
        return params.kv_len;
    }
    return u32(clamp(params.start + i32(row / params.group) + 1, 0, i32(params.kv_len)));
}

// What the schedule of a batch fixes: distances in elements between neighbours.
struct Strides {
    q_seq: u32,
    q_head: u32,
    k_page: u32, // if keys lie in pages
    k_seq: u32,
    k_head: u32,
    v_page: u32,
    v_seq: u32,
    v_head: u32,
    out_seq: u32,
    out_head: u32,
    lse_head: u32,
    bias_key: u32,
    mask_key: u32,
    kv_heads: u32,
}

@group(0) @binding(1) var<uniform> strides: Strides;

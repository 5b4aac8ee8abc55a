// First pass of the unfused attention: S = scale · Q·Kᵀ.
//
// One workgroup makes 64 rows (`workgroup_id.y`) × 64 keys (`.x`) of plane `.z`, unless no row of them sees any of these keys;
// a lane makes 8×8 of them. What a row does not see is left to the next pass.

import package::parts::tile64::multiply;
import package::parts::tile64::stage_turned;
import package::parts::tile64::row_of;
import package::parts::tile64::column_of;
import package::parts::unfused::key_end;
@binding(2) import package::parts::load_f32 as q;
@binding(3) import package::parts::load_f32 as k;

@group(0) @binding(1) var<storage, read_write> scores: array<vec4<f32>>;

var<workgroup> row_offsets: array<vec4<u32>, 16>; // of Q's rows, in elements

// Loads STEP dims from `dim` on of 64 rows and 64 keys. Those past the end repeat the last one and are not stored.
fn stage_q_and_k(k_offset: u32, key: u32, dim: u32, lane: u32) {
    let columns = STEP / 4u;
    for (var b = lane; b < columns * 32u; b += WORKGROUP) {
        let inner = 4u * (b % columns);
        let four = b / columns;
        let d = dim + inner;
        let left = i32(params.qk_dim) - i32(d);
        var block: mat4x4<f32>;
        if four < 16u {
            let at = row_offsets[four] + d;
            block = mat4x4<f32>(q::load4(at.x, left), q::load4(at.y, left), q::load4(at.z, left), q::load4(at.w, left));
        } else {
            let j = min(vec4<u32>(key + 4u * (four - 16u)) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.kv_len - 1u));
            let at = k_offset + j * params.k_seq + d;
            block = mat4x4<f32>(k::load4(at.x, left), k::load4(at.y, left), k::load4(at.z, left), k::load4(at.w, left));
        }
        stage_turned(inner, four, block);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let first_row = 64u * workgroup.y;
    let first_key = 64u * workgroup.x;
    if first_key >= key_end(min(first_row + 63u, params.rows - 1u)) {
        return;
    }
    let plane = params.first_plane + workgroup.z;
    let sequence = plane / params.kv_heads;
    let kv_head = plane % params.kv_heads;
    for (var i = lane; i < 16u; i += WORKGROUP) {
        let row = min(vec4<u32>(first_row + 4u * i) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.rows - 1u));
        let head = kv_head * params.group + row % params.group;
        row_offsets[i] = params.q_first + sequence * params.q_batch + row / params.group * params.q_seq + head * params.q_head;
    }
    let k_offset = params.k_first + sequence * params.k_batch + kv_head * params.k_head;

    var sums: array<vec4<f32>, SUMS>;
    for (var i = 0u; i < SUMS; i += 1u) {
        sums[i] = vec4<f32>();
    }
    for (var dim = 0u; dim < params.qk_dim; dim += STEP) {
        workgroupBarrier(); // the last readers of `stage` are done; `row_offsets` is written
        stage_q_and_k(k_offset, first_key, dim, lane);
        workgroupBarrier();
        multiply(&sums, lane);
    }
    for (var i = 0u; i < SUMS; i += 1u) {
        let row = first_row + row_of(i, lane);
        let column = first_key / 4u + column_of(i, lane);
        if row < params.rows && column < params.pitch - 1u {
            scores[(workgroup.z * params.rows + row) * params.pitch + column] = sums[i] * params.scale;
        }
    }
}

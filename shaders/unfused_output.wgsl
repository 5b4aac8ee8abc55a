// Third pass of the unfused attention: O = P·V, each row times its factor.
//
// One workgroup makes 64 rows (`workgroup_id.y`) × 64 dims (`.x`) of plane `.z` from the keys that any of the rows sees;
// a lane makes 8×8 of them.

import package::parts::tile64::multiply;
import package::parts::tile64::stage_turned;
import package::parts::tile64::put_aside;
import package::parts::tile64::aside;
import package::parts::tile64::row_of;
import package::parts::tile64::column_of;
import package::parts::unfused::key_end;
@binding(2) import package::parts::load_f32 as v;
@binding(3) import package::parts::store_f32 as out;

@group(0) @binding(1) var<storage, read> scores: array<vec4<f32>>;

// Four weights of a row; 0 for keys it does not see, whatever lies there.
fn weights(first: u32, row: u32, key: u32) -> vec4<f32> {
    let known = min(row, params.rows - 1u);
    let p = scores[first + known * params.pitch + min(key / 4u, params.pitch - 1u)];
    return select(vec4<f32>(), p, vec4<u32>(key) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(key_end(known)));
}

fn stage_p_and_v(scores_first: u32, v_offset: u32, row: u32, key: u32, dim: u32, lane: u32) {
    let columns = STEP / 4u;
    for (var b = lane; b < columns * 16u; b += WORKGROUP) {
        let inner = 4u * (b % columns);
        let r = row + 4u * (b / columns);
        let j = key + inner;
        stage_turned(inner, b / columns, mat4x4<f32>(
            weights(scores_first, r, j),
            weights(scores_first, r + 1u, j),
            weights(scores_first, r + 2u, j),
            weights(scores_first, r + 3u, j),
        ));
    }
    for (var b = lane; b < STEP * 16u; b += WORKGROUP) {
        let j = min(key + b / 16u, params.kv_len - 1u);
        let d = dim + 4u * (b % 16u);
        stage[b / 16u * STAGE_PITCH + 16u + b % 16u] = v::load4(v_offset + j * params.v_seq + d, i32(params.v_dim) - i32(d));
    }
}

// Stores the half of the lane's sums that is aside, which begins with sum `first`.
fn store(first: u32, workgroup: vec3<u32>, lane: u32) {
    let plane = params.first_plane + workgroup.z;
    let kv_head = plane % params.kv_heads;
    for (var i = 0u; i < SUMS / 2u; i += 1u) {
        let row = 64u * workgroup.y + row_of(first + i, lane);
        let d = 64u * workgroup.x + 4u * column_of(first + i, lane);
        let left = i32(params.v_dim) - i32(d);
        if row < params.rows && left > 0 {
            let factor = scores[(workgroup.z * params.rows + row) * params.pitch + params.pitch - 1u].x;
            let head = kv_head * params.group + row % params.group;
            let at = params.out_first + plane / params.kv_heads * params.out_batch + row / params.group * params.out_seq;
            out::store4(at + head * params.out_head + d, aside(i, lane) * factor, left);
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let first_row = 64u * workgroup.y;
    let first_dim = 64u * workgroup.x;
    let plane = params.first_plane + workgroup.z;
    let sequence = plane / params.kv_heads;
    let kv_head = plane % params.kv_heads;
    let scores_first = workgroup.z * params.rows * params.pitch;
    let v_offset = params.v_first + sequence * params.v_batch + kv_head * params.v_head;

    var sums: array<vec4<f32>, SUMS>;
    for (var i = 0u; i < SUMS; i += 1u) {
        sums[i] = vec4<f32>();
    }
    let end = key_end(min(first_row + 63u, params.rows - 1u));
    for (var key = 0u; key < end; key += STEP) {
        workgroupBarrier(); // the last readers of `stage` are done
        stage_p_and_v(scores_first, v_offset, first_row, key, first_dim, lane);
        workgroupBarrier();
        multiply(&sums, lane);
    }
    workgroupBarrier(); // `stage` is free
    put_aside(&sums, 0u, lane);
    store(0u, workgroup, lane);
    put_aside(&sums, SUMS / 2u, lane);
    store(SUMS / 2u, workgroup, lane);
}
